"""The numbered files that make the ledger's tables, views and functions on PostgreSQL."""

LAST_RELEASED = 0
"""The newest migration of the last release; 0: nothing was released. Changed with every release."""
