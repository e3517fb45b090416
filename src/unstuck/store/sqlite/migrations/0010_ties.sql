-- What a job may be tied to beyond itself: a workflow, a line, follow-up work, a journal, a signal. One flag (`tied`) says
-- whether anybody else is concerned when it ends.

ALTER TABLE unstuck_jobs ADD COLUMN tied INTEGER NOT NULL DEFAULT 0;
-- Pending, and not let in yet: so many of its line are at work as may be.
ALTER TABLE unstuck_jobs ADD COLUMN blocked INTEGER NOT NULL DEFAULT 0;
ALTER TABLE unstuck_jobs ADD COLUMN line TEXT;
ALTER TABLE unstuck_jobs ADD COLUMN workflow_id INTEGER;
ALTER TABLE unstuck_jobs ADD COLUMN place INTEGER;
-- The tasks that follow its ends, by kind of end, as JSON.
ALTER TABLE unstuck_jobs ADD COLUMN hooks TEXT;
-- It wrote something down on its way, or was sent a signal: whoever tries it again needs that.
ALTER TABLE unstuck_jobs ADD COLUMN journal INTEGER NOT NULL DEFAULT 0;
-- The signal that it waits for.
ALTER TABLE unstuck_jobs ADD COLUMN awaits TEXT;
ALTER TABLE unstuck_jobs ADD COLUMN expires_at REAL;
-- How long it is kept after its end, where its task says so.
ALTER TABLE unstuck_jobs ADD COLUMN keep_s REAL;

-- There is one state more, and one more way to be pending. SQLite cannot change a CHECK, and a new table would have to take
-- over every row and every reference; what is stored stays as it is, so the text of the schema may be changed in place
-- (as https://www.sqlite.org/lang_altertable.html says in section 7).
PRAGMA writable_schema = ON;
UPDATE sqlite_schema
SET sql = replace(replace(sql,
    'state IN (''pending'', ''claimed'', ''running'', ''succeeded'', ''failed'', ''cancelled'', ''quarantined'')',
    'state IN (''pending'', ''claimed'', ''running'', ''waiting'', ''succeeded'', ''failed'', ''cancelled'', ''quarantined'')'),
    'CHECK (ready + waiting = (state = ''pending''))',
    'CHECK (ready + waiting + blocked = (state = ''pending'') OR state = ''waiting'' AND ready + blocked = 0 AND (waiting OR awaits IS NOT NULL))')
WHERE type = 'table' AND name = 'unstuck_jobs';
UPDATE sqlite_schema
SET sql = replace(sql,
    'state IN (''succeeded'', ''failed'', ''crashed'', ''drained'', ''cancelled'')',
    'state IN (''succeeded'', ''failed'', ''crashed'', ''drained'', ''cancelled'', ''suspended'')')
WHERE type = 'table' AND name = 'unstuck_attempts';
PRAGMA writable_schema = RESET;

CREATE INDEX unstuck_jobs_blocked ON unstuck_jobs (line, rank, id) WHERE blocked = 1;
CREATE INDEX unstuck_jobs_awaiting ON unstuck_jobs (id) WHERE awaits IS NOT NULL;
