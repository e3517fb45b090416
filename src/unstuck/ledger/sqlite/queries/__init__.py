"""The SQLite ledger's named queries."""
