"""The SQL functions of the PostgreSQL ledger: one file per function or small family. `migrate` keeps them current."""
