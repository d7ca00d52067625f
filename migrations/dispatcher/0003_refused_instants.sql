-- A schedule's instant that its task skipped: no run stands for it, so a repeat of its order finds its answer here.
CREATE TABLE refused_instants (
  project_id TEXT NOT NULL,
  idempotency_key TEXT NOT NULL,
  request_digest TEXT NOT NULL,
  error TEXT NOT NULL,
  detail TEXT NOT NULL,
  refused_at_ms BIGINT NOT NULL CHECK (refused_at_ms >= 0),
  PRIMARY KEY (project_id, idempotency_key)
);
CREATE INDEX refused_instants_age ON refused_instants (refused_at_ms);
