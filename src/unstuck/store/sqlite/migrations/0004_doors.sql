-- Workers that come through another door than Python's own: over HTTP or ZeroMQ, in any language.

ALTER TABLE unstuck_workers ADD COLUMN door TEXT NOT NULL DEFAULT 'python' CHECK (door IN ('python', 'http', 'mdp'));
-- The token that it came with: nobody else may speak for it.
ALTER TABLE unstuck_workers ADD COLUMN owner TEXT;

-- A name is only a name, but a beat may come with nothing else: it must lead to one living worker.
CREATE UNIQUE INDEX unstuck_workers_living_name ON unstuck_workers (name)
WHERE door <> 'python' AND state IN ('active', 'draining', 'suspect');
CREATE INDEX unstuck_workers_by_name ON unstuck_workers (name, created_at) WHERE door <> 'python';

-- Bells of processes that are no worker and want to hear every word: those that speak for foreign workers.
CREATE TABLE unstuck_listeners (address TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
