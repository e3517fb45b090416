"""The named queries of the PostgreSQL ledger, one file per part of its contract."""
