-- Workers that come through another door than Python's own: over HTTP or ZeroMQ, in any language.

ALTER TABLE unstuck_workers ADD COLUMN door TEXT NOT NULL DEFAULT 'python' CHECK (door IN ('python', 'http', 'mdp'));
-- The token that it came with: nobody else may speak for it.
ALTER TABLE unstuck_workers ADD COLUMN owner TEXT;
CREATE INDEX unstuck_workers_by_name ON unstuck_workers (name) WHERE door <> 'python';
