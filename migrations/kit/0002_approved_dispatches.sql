-- What this service committed for an approved action's dispatch id: `done` with the effect, in its transaction, or
-- `closed`, a tombstone that refuses an effect which comes too late. One of them, for ever.
-- ql3: append-only approved_dispatches

CREATE TABLE approved_dispatches (
  dispatch_id TEXT PRIMARY KEY CHECK (length(dispatch_id) BETWEEN 1 AND 64),
  project TEXT NOT NULL,
  outcome TEXT NOT NULL CHECK (outcome IN ('done', 'closed')),
  resource TEXT,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  CONSTRAINT approved_dispatch_resource CHECK ((resource IS NOT NULL) = (outcome = 'done'))
);
