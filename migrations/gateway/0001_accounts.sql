-- How people and programs prove who they are. Who they are, and what they may do, approval knows.

CREATE TABLE password_credentials (
  user_name TEXT PRIMARY KEY,
  hash TEXT NOT NULL,
  version BIGINT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  updated_at_ms BIGINT NOT NULL
);

-- `sealed` is the shared secret under a key derived from the gateway's pepper; `last_step` makes a code good for once.
CREATE TABLE totp_credentials (
  user_name TEXT PRIMARY KEY,
  sealed TEXT NOT NULL,
  confirmed INTEGER NOT NULL DEFAULT 0 CHECK (confirmed IN (0, 1)),
  last_step BIGINT NOT NULL DEFAULT 0,
  created_at_ms BIGINT NOT NULL
);

-- One-time links with which a person sets a password.
CREATE TABLE password_links (
  id TEXT PRIMARY KEY,
  user_name TEXT NOT NULL,
  digest TEXT NOT NULL,
  issued_by TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  used_at_ms BIGINT
);

CREATE TABLE sessions (
  id TEXT PRIMARY KEY,
  user_name TEXT NOT NULL,
  digest TEXT NOT NULL,
  assurance TEXT NOT NULL CHECK (assurance IN ('single_factor', 'multi_factor')),
  authenticated_at_ms BIGINT NOT NULL,
  seen_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  revoked_at_ms BIGINT
);
CREATE INDEX sessions_of_user ON sessions (user_name, authenticated_at_ms);
CREATE INDEX sessions_by_expiry ON sessions (expires_at_ms);

-- A rotation is a new version; the highest version carries the state.
CREATE TABLE api_credentials (
  id TEXT NOT NULL,
  version BIGINT NOT NULL,
  digest TEXT NOT NULL,
  name TEXT NOT NULL,
  subject_type TEXT NOT NULL,
  subject_id TEXT NOT NULL,
  assurance TEXT NOT NULL CHECK (assurance IN ('single_factor', 'service', 'local_console')),
  created_by TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  revoked_at_ms BIGINT,
  PRIMARY KEY (id, version)
);
CREATE INDEX api_credentials_of_subject ON api_credentials (subject_type, subject_id, created_at_ms);

-- What a POST with an Idempotency-Key was, and what was answered. Without an answer it may be asked again, with the
-- same mutation id, so that the owning service makes it once.
CREATE TABLE idempotency_records (
  actor TEXT NOT NULL,
  idempotency_key TEXT NOT NULL,
  request_digest TEXT NOT NULL,
  mutation_id TEXT NOT NULL,
  status INTEGER,
  body TEXT,
  created_at_ms BIGINT NOT NULL,
  PRIMARY KEY (actor, idempotency_key)
);
CREATE INDEX idempotency_records_by_age ON idempotency_records (created_at_ms);
