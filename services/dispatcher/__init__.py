"""The run ledger: runs, attempts, events, leases, workers and cancellations."""
