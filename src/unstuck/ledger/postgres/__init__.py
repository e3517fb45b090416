"""The ledger on PostgreSQL: many machines."""
