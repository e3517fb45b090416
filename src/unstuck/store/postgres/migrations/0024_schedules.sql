-- Schedules.

select 1;
