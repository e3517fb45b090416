"""The ledger: the only room with SQL."""
