-- What this worker took on and has not settled yet. A row goes when the dispatcher has acknowledged its end.
CREATE TABLE execution_offers (
  attempt_id TEXT PRIMARY KEY,
  offer_id TEXT NOT NULL,
  run_id TEXT NOT NULL,
  project TEXT NOT NULL,
  lease_generation BIGINT NOT NULL,
  -- Boot, pid and start ticks of the process host at that time: if another host answers later, this one cannot be asked.
  host TEXT NOT NULL,
  accepted_at_ms BIGINT NOT NULL
);

-- Ends that the process host has no receipt of (never started, vanished), and corrected reports of large logs.
CREATE TABLE completion_receipts (
  attempt_id TEXT PRIMARY KEY REFERENCES execution_offers (attempt_id) ON DELETE CASCADE,
  sequence BIGINT NOT NULL,
  body TEXT NOT NULL,
  proof TEXT NOT NULL,
  registered_at_ms BIGINT NOT NULL
);
