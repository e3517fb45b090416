-- What jobs wrote down on their way, and the signals that were sent to them.

SELECT 1;
