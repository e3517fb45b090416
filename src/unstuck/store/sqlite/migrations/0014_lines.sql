-- Lines: how many jobs with the same concurrency key may be at work at once; limits of queues.

SELECT 1;
