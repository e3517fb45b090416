"""The SQLite ledger's tables, as numbered migrations."""
