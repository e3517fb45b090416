-- Work that follows the ends of other work.

SELECT 1;
