"""The ledger in a file: one host, no server."""
