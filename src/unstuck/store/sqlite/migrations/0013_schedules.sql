-- Schedules.

SELECT 1;
