"""The numbered files that make the ledger's tables, views and functions on PostgreSQL."""
