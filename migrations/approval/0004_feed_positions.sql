-- How far the facts of another service were read.
CREATE TABLE feed_positions (
  owner TEXT PRIMARY KEY,
  position TEXT NOT NULL,
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0)
);
