-- How far the facts of other services were read, for triggers that follow another task.
CREATE TABLE feed_positions (
  owner TEXT PRIMARY KEY,
  position TEXT NOT NULL,
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0)
);

-- The SHA-256 of a webhook's secret path; the secret itself is nowhere.
CREATE TABLE webhooks (
  trigger_id TEXT PRIMARY KEY REFERENCES triggers (id),
  token_digest TEXT NOT NULL CHECK (length(token_digest) = 64),
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0)
);

-- When the system started last, so that schedulers that start together agree on one start.
CREATE TABLE system_start (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  started_at_ms BIGINT NOT NULL CHECK (started_at_ms >= 0)
);
INSERT INTO system_start (id, started_at_ms) VALUES (1, 0);
