"""Leave a ledger on PostgreSQL as it was when its tables were new, by a session that stays: a new one would look up and
plan everything anew, which is nine tenths of the work."""

from typing import Any

import psycopg

MAX_GROWTH_BYTES = 8 << 20
"""Swept rows leave their place behind; a database that has grown by so much is not lent again."""
_OTHERS = """
select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity
where backend_type = 'client backend' and pid <> pg_backend_pid() and datname = current_database()
"""
_SHAPE = """
select (select count(*) from pg_class), (select count(*) from pg_attribute), (select count(*) from pg_proc),
       (select count(*) from pg_trigger), (select count(*) from pg_constraint), (select count(*) from pg_namespace),
       (select string_agg(concat_ws(' ', oid, relname, reloptions::text, relacl::text, relowner), ' ' order by oid)
        from pg_class where relnamespace = 'unstuck'::regnamespace),
       (select md5(string_agg(concat_ws(' ', attrelid, attname, atttypid, attnotnull, atthasdef), ' '
                              order by attrelid, attnum))
        from pg_attribute join pg_class on pg_class.oid = attrelid where relnamespace = 'unstuck'::regnamespace),
       (select md5(string_agg(concat_ws(' ', oid, prosrc), ' ' order by oid)) from pg_proc
        where pronamespace = 'unstuck'::regnamespace),
       (select string_agg(concat_ws(' ', oid, tgenabled), ' ' order by oid) from pg_trigger where not tgisinternal),
       (select nspacl::text from pg_namespace where nspname = 'unstuck'),
       (select count(*) from pg_prepared_xacts where database = current_database()),
       (select count(*) from pg_db_role_setting join pg_database d on d.oid = setdatabase
        where d.datname = current_database()),
       (select string_agg(m::text, ' ' order by m::text) from unstuck.migrations m),
       (select md5(string_agg(f::text, ' ' order by f::text)) from unstuck.functions f)
"""
"""All of a database that is not rows of the ledger."""
_ROWS = """
select string_agg(format('delete from unstuck.%I', tablename), '; ')
from pg_tables where schemaname = 'unstuck' and tablename not in ('migrations', 'functions')
"""
_NUMBERS = """
select setval(format('unstuck.%I', sequencename)::regclass, start_value, false)
from pg_sequences where schemaname = 'unstuck'
"""


class Broom:
    """One session with one database; where somebody cut it, the next word opens another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: psycopg.Connection[Any] | None = None
        self._rows = ""

    def sweep(self) -> None:
        self._rows = self._rows or self._ask(_ROWS)[0]
        self._ask(f"{self._rows}; insert into unstuck.ledger default values; {_NUMBERS}")

    def cut_others(self) -> None:
        """End every other session, and wait until they are gone."""
        self._ask(_OTHERS)

    def shape(self) -> tuple[Any, ...]:
        return self._ask(_SHAPE)

    def size_bytes(self) -> int:
        return int(self._ask("select pg_database_size(current_database())")[0])

    def server_version(self) -> int:
        return int(self._ask("select current_setting('server_version_num')::int / 10000")[0])

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ask(self, words: str) -> tuple[Any, ...]:
        try:
            return self._say(words)
        except psycopg.OperationalError:
            self.close()  # whoever cuts every session cuts this one as well
            return self._say(words)

    def _say(self, words: str) -> tuple[Any, ...]:
        if self._session is None:
            self._session = psycopg.connect(self._url, autocommit=True, application_name="broom")
        cursor = self._session.execute(words, prepare=False)  # type: ignore[call-overload]
        while cursor.nextset():
            pass
        row: tuple[Any, ...] = cursor.fetchone()
        return row
