-- The `SET` clauses that functions share. A line `{nested_loops}` in a function stands for the lines below that name.
-- Settings that only one function needs, and its `lock_timeout` (docs/decisions/lock-waits.md), stand in the function.

-- name: fixed_path
-- Every function: no object of another schema can take the place of a built-in one.
set search_path = pg_catalog, pg_temp

-- name: index_scans
-- No scan of a whole table, whatever the statistics say: they may be of a moment when the table was empty.
{fixed_path}
set enable_seqscan = off

-- name: plain_index_scans
-- In the order of the index, which a bitmap loses, and with no time spent on compiling.
{index_scans}
set enable_bitmapscan = off
set jit = off

-- name: nested_loops
-- One plan for the life of a session: for each of the rows that were asked for, a look into an index.
{plain_index_scans}
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off

-- name: nested_loops_in_order
-- The order comes from the index: a sort would read everything first.
{nested_loops}
set enable_sort = off
set enable_incremental_sort = off

-- name: loops_as_written
-- Joins in the order in which they are written, and a high price for every row that is read: plans are made while the
-- tables of workflows are empty.
{nested_loops}
set random_page_cost = 1
set cpu_tuple_cost = 10
set join_collapse_limit = 1
