-- Workflows.

SELECT 1;
