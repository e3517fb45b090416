"""The SQLite ledger's tables, as numbered migrations."""

LAST_RELEASED = 0
"""The newest migration of the last release; 0: nothing was released. Changed with every release."""
