"""What keeps the ledger healthy: due jobs, expiry, concurrency keys, workflows, retention, worker health, schedules."""
