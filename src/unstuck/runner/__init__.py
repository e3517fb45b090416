"""The bench where user code runs; it knows nothing of the ledger."""
