"""The SQLite ledger's tables, indexes and views, as numbered migrations. A file is never changed, only added."""

LAST_RELEASED = 0
"""The newest migration of the last release; 0: nothing was released. Changed with every release."""
