-- The run ledger. Every time is the database's clock in ms UTC; every flag is 0 or 1; JSON is kept as text.
-- ql3: append-only run_events
-- ql3: purgeable run_events by run_id before created_at_ms
-- ql3: append-only pinned_revisions
-- ql3: append-only approved_run_action_receipts

-- What a run executes, by the digest of its content; frozen with the run.
CREATE TABLE pinned_revisions (
  digest TEXT PRIMARY KEY CHECK (length(digest) = 64),
  project_id TEXT NOT NULL,
  task_id TEXT NOT NULL,
  task_name TEXT NOT NULL,
  task_revision BIGINT NOT NULL CHECK (task_revision >= 1),
  content TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0)
);
CREATE INDEX pinned_revisions_task ON pinned_revisions (project_id, task_id);

-- A machine that runs attempts, and its present session. A replaced session can write nothing any more.
CREATE TABLE workers (
  id TEXT PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 63),
  session_id TEXT NOT NULL UNIQUE,
  generation BIGINT NOT NULL CHECK (generation >= 1),
  status TEXT NOT NULL CHECK (status IN ('online', 'draining', 'offline')),
  drain_requested INTEGER NOT NULL DEFAULT 0 CHECK (drain_requested IN (0, 1)),
  version BIGINT NOT NULL DEFAULT 0 CHECK (version >= 0),
  slots BIGINT NOT NULL CHECK (slots >= 0),
  capabilities TEXT NOT NULL,
  capabilities_digest TEXT NOT NULL CHECK (length(capabilities_digest) = 64),
  public_key TEXT NOT NULL,
  registered_at_ms BIGINT NOT NULL CHECK (registered_at_ms >= 0),
  last_heartbeat_at_ms BIGINT NOT NULL CHECK (last_heartbeat_at_ms >= registered_at_ms),
  lease_expires_at_ms BIGINT NOT NULL CHECK (lease_expires_at_ms >= last_heartbeat_at_ms),
  silent_since_ms BIGINT CHECK (silent_since_ms >= 0)
);

-- One execution that somebody asked for. `lane` groups queued runs that may go to the same places under the same limits.
CREATE TABLE runs (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  project_id TEXT NOT NULL CHECK (length(project_id) BETWEEN 1 AND 63),
  task_id TEXT NOT NULL,
  task_name TEXT NOT NULL,
  task_revision BIGINT NOT NULL CHECK (task_revision >= 1),
  revision_digest TEXT NOT NULL REFERENCES pinned_revisions (digest),
  lane TEXT NOT NULL,
  trigger_type TEXT NOT NULL,
  trigger_id TEXT,
  scheduled_for_ms BIGINT CHECK (scheduled_for_ms >= 0),
  not_before_ms BIGINT CHECK (not_before_ms >= 0),
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  request_id TEXT,
  parent_run_id TEXT,
  retry_of_run_id TEXT,
  idempotency_key TEXT NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  request_digest TEXT NOT NULL CHECK (length(request_digest) = 64),
  inputs TEXT,
  priority INTEGER NOT NULL DEFAULT 0,
  status TEXT NOT NULL CHECK (status IN (
    'created', 'queued', 'dispatching', 'running', 'waiting_approval', 'retry_wait', 'lost',
    'succeeded', 'failed', 'cancelled', 'timed_out')),
  version BIGINT NOT NULL CHECK (version >= 1),
  event_sequence BIGINT NOT NULL CHECK (event_sequence >= 1),
  attempt INTEGER NOT NULL DEFAULT 0 CHECK (attempt BETWEEN 0 AND 16),
  attempt_id TEXT,
  worker_id TEXT,
  exit_code INTEGER,
  error_code TEXT,
  error_summary TEXT CHECK (length(error_summary) <= 1024),
  cancel_requested_at_ms BIGINT CHECK (cancel_requested_at_ms >= 0),
  cancel_reason TEXT CHECK (cancel_reason IN ('user', 'policy', 'shutdown', 'reconcile', 'timeout')),
  queue_deadline_ms BIGINT CHECK (queue_deadline_ms >= 0),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  queued_at_ms BIGINT CHECK (queued_at_ms >= 0),
  started_at_ms BIGINT CHECK (started_at_ms >= 0),
  finished_at_ms BIGINT CHECK (finished_at_ms >= 0),
  CONSTRAINT runs_cancel_pair CHECK ((cancel_requested_at_ms IS NULL) = (cancel_reason IS NULL)),
  CONSTRAINT runs_end_has_time CHECK (
    (finished_at_ms IS NOT NULL) = (status IN ('succeeded', 'failed', 'cancelled', 'timed_out'))),
  CONSTRAINT runs_attempt_pair CHECK ((attempt = 0) = (attempt_id IS NULL)),
  CONSTRAINT runs_in_work_have_attempt CHECK (status NOT IN ('queued', 'dispatching', 'running') OR attempt >= 1),
  CONSTRAINT runs_in_work_have_worker CHECK (status NOT IN ('dispatching', 'running') OR worker_id IS NOT NULL),
  CONSTRAINT runs_queue_deadline CHECK (queue_deadline_ms IS NULL OR status IN ('queued', 'dispatching'))
);
CREATE UNIQUE INDEX runs_idempotency ON runs (project_id, idempotency_key);
CREATE INDEX runs_by_project ON runs (project_id, created_at_ms, id);
CREATE INDEX runs_by_task ON runs (project_id, task_name, created_at_ms, id);
CREATE INDEX runs_open ON runs (project_id, task_id, created_at_ms, id) WHERE finished_at_ms IS NULL;
CREATE INDEX runs_unhappy ON runs (project_id, created_at_ms, id) WHERE status IN ('failed', 'cancelled', 'timed_out');
CREATE INDEX runs_queue ON runs (lane, priority DESC, queued_at_ms, id) WHERE status = 'queued';
CREATE INDEX runs_queue_deadline_due ON runs (queue_deadline_ms, id) WHERE queue_deadline_ms IS NOT NULL;
CREATE INDEX runs_cancel_open ON runs (cancel_requested_at_ms, id)
  WHERE cancel_requested_at_ms IS NOT NULL AND finished_at_ms IS NULL;
CREATE INDEX runs_ended ON runs (project_id, finished_at_ms, id) WHERE finished_at_ms IS NOT NULL;

-- One try of a run. `token_digest` is the SHA-256 of a token that only the worker can make.
CREATE TABLE run_attempts (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  run_id TEXT NOT NULL REFERENCES runs (id),
  attempt INTEGER NOT NULL CHECK (attempt BETWEEN 1 AND 16),
  status TEXT NOT NULL CHECK (status IN (
    'claimed', 'starting', 'running', 'succeeded', 'failed', 'cancelled', 'timed_out', 'lost')),
  executor TEXT NOT NULL,
  worker_id TEXT,
  token_digest TEXT CHECK (length(token_digest) = 64),
  callback_sequence BIGINT NOT NULL DEFAULT 0 CHECK (callback_sequence >= 0),
  pid BIGINT CHECK (pid >= 1),
  exit_code INTEGER,
  signal INTEGER,
  error_code TEXT,
  error_summary TEXT CHECK (length(error_summary) <= 1024),
  late_exit_code INTEGER,
  late_receipt INTEGER NOT NULL DEFAULT 0 CHECK (late_receipt IN (0, 1)),
  log TEXT,
  deadline_at_ms BIGINT CHECK (deadline_at_ms >= 0),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  started_at_ms BIGINT CHECK (started_at_ms >= 0),
  finished_at_ms BIGINT CHECK (finished_at_ms >= 0),
  CONSTRAINT run_attempts_of_run UNIQUE (run_id, id),
  CONSTRAINT run_attempts_end_has_time CHECK (
    (finished_at_ms IS NULL) = (status IN ('claimed', 'starting', 'running'))),
  CONSTRAINT run_attempts_started_has_token CHECK (status NOT IN ('starting', 'running') OR token_digest IS NOT NULL)
);
CREATE UNIQUE INDEX run_attempts_number ON run_attempts (run_id, attempt);
CREATE UNIQUE INDEX run_attempts_one_active ON run_attempts (run_id) WHERE status IN ('claimed', 'starting', 'running');
CREATE INDEX run_attempts_deadline_due ON run_attempts (deadline_at_ms, id)
  WHERE deadline_at_ms IS NOT NULL AND status IN ('starting', 'running');

-- What happened to a run, in order; never changed.
CREATE TABLE run_events (
  run_id TEXT NOT NULL,
  sequence BIGINT NOT NULL CHECK (sequence >= 1),
  type TEXT NOT NULL CHECK (length(type) BETWEEN 1 AND 128),
  dedupe_key TEXT CHECK (length(dedupe_key) <= 255),
  actor_type TEXT NOT NULL CHECK (actor_type IN (
    'user', 'api_app', 'trigger', 'agent', 'mcp_client', 'worker', 'executor', 'system', 'scheduler', 'reconciler')),
  actor_id TEXT,
  attempt_id TEXT,
  payload TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  PRIMARY KEY (run_id, sequence),
  FOREIGN KEY (run_id) REFERENCES runs (id),
  FOREIGN KEY (run_id, attempt_id) REFERENCES run_attempts (run_id, id)
);
CREATE UNIQUE INDEX run_events_dedupe ON run_events (run_id, dedupe_key) WHERE dedupe_key IS NOT NULL;

-- Automatic tries after the first, frozen at admission. A run without a row has one attempt.
CREATE TABLE run_retry_policies (
  run_id TEXT PRIMARY KEY REFERENCES runs (id),
  max_attempts INTEGER NOT NULL CHECK (max_attempts BETWEEN 1 AND 16),
  retry_on TEXT NOT NULL,
  safety TEXT NOT NULL CHECK (safety IN ('unknown', 'idempotent', 'deduplicated')),
  backoff_base_ms BIGINT NOT NULL CHECK (backoff_base_ms BETWEEN 0 AND 86400000),
  backoff_max_ms BIGINT NOT NULL CHECK (backoff_max_ms BETWEEN 0 AND 86400000),
  jitter_percent INTEGER NOT NULL CHECK (jitter_percent BETWEEN 0 AND 100),
  next_attempt_at_ms BIGINT CHECK (next_attempt_at_ms >= 0),
  version BIGINT NOT NULL DEFAULT 0 CHECK (version >= 0)
);
CREATE INDEX run_retry_policies_due ON run_retry_policies (next_attempt_at_ms, run_id)
  WHERE next_attempt_at_ms IS NOT NULL;

-- The exclusive right of one worker session to run one attempt. One row per attempt, used again by each later lease.
CREATE TABLE run_dispatch_leases (
  attempt_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  project_id TEXT NOT NULL,
  task_id TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('leased', 'released', 'completed')),
  version BIGINT NOT NULL CHECK (version >= 1),
  lease_generation BIGINT NOT NULL CHECK (lease_generation >= 1),
  worker_id TEXT NOT NULL REFERENCES workers (id),
  worker_session_id TEXT NOT NULL,
  worker_generation BIGINT NOT NULL CHECK (worker_generation >= 1),
  offer_id TEXT NOT NULL UNIQUE,
  offers INTEGER NOT NULL CHECK (offers >= 1),
  next_offer_at_ms BIGINT CHECK (next_offer_at_ms >= 0),
  token_digest TEXT CHECK (length(token_digest) = 64),
  acquired_at_ms BIGINT NOT NULL CHECK (acquired_at_ms >= 0),
  renewed_at_ms BIGINT NOT NULL CHECK (renewed_at_ms >= acquired_at_ms),
  expires_at_ms BIGINT NOT NULL CHECK (expires_at_ms > renewed_at_ms),
  released_at_ms BIGINT CHECK (released_at_ms >= 0),
  release_reason TEXT CHECK (release_reason IN ('expired', 'session_replaced', 'cancelled', 'not_started', 'lost')),
  completed_at_ms BIGINT CHECK (completed_at_ms >= 0),
  FOREIGN KEY (run_id, attempt_id) REFERENCES run_attempts (run_id, id),
  CONSTRAINT run_dispatch_leases_released CHECK (
    (status = 'released') = (released_at_ms IS NOT NULL) AND (released_at_ms IS NULL) = (release_reason IS NULL)),
  CONSTRAINT run_dispatch_leases_completed CHECK ((status = 'completed') = (completed_at_ms IS NOT NULL)),
  CONSTRAINT run_dispatch_leases_offer_open CHECK (
    (next_offer_at_ms IS NOT NULL) = (status = 'leased' AND token_digest IS NULL))
);
CREATE INDEX run_dispatch_leases_expiry ON run_dispatch_leases (expires_at_ms, attempt_id) WHERE status = 'leased';
CREATE INDEX run_dispatch_leases_worker ON run_dispatch_leases (worker_id, attempt_id) WHERE status = 'leased';
CREATE INDEX run_dispatch_leases_task ON run_dispatch_leases (project_id, task_id) WHERE status = 'leased';
CREATE INDEX run_dispatch_leases_offer_due ON run_dispatch_leases (next_offer_at_ms, attempt_id)
  WHERE next_offer_at_ms IS NOT NULL;

-- Named limits that a live lease counts under.
CREATE TABLE run_lease_keys (
  attempt_id TEXT NOT NULL REFERENCES run_dispatch_leases (attempt_id),
  project_id TEXT NOT NULL,
  limit_key TEXT NOT NULL,
  PRIMARY KEY (attempt_id, limit_key)
);

-- One row per task, project or named key that has a limit; locked in sorted order while live leases are counted.
CREATE TABLE concurrency_limits (
  project_id TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('project', 'task', 'key')),
  limit_key TEXT NOT NULL,
  max_live BIGINT NOT NULL CHECK (max_live >= 1),
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0),
  PRIMARY KEY (project_id, kind, limit_key)
);

-- Delivery of a cancel intent to the worker that holds an attempt, until the report proves that the tree is gone.
CREATE TABLE run_cancellation_dispatches (
  attempt_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  dispatch_id TEXT NOT NULL UNIQUE,
  status TEXT NOT NULL CHECK (status IN ('pending', 'dispatched', 'settled', 'blocked')),
  version BIGINT NOT NULL CHECK (version >= 0),
  dispatch_count BIGINT NOT NULL CHECK (dispatch_count >= 0),
  worker_id TEXT NOT NULL,
  lease_generation BIGINT NOT NULL CHECK (lease_generation >= 1),
  reason TEXT NOT NULL CHECK (reason IN ('user', 'policy', 'shutdown', 'reconcile', 'timeout')),
  grace_ms BIGINT NOT NULL CHECK (grace_ms >= 0),
  next_attempt_at_ms BIGINT CHECK (next_attempt_at_ms >= 0),
  last_dispatched_at_ms BIGINT CHECK (last_dispatched_at_ms >= 0),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  settled_at_ms BIGINT CHECK (settled_at_ms >= 0),
  FOREIGN KEY (run_id, attempt_id) REFERENCES run_attempts (run_id, id),
  CONSTRAINT run_cancellation_dispatches_due CHECK (
    (next_attempt_at_ms IS NOT NULL) = (status IN ('pending', 'dispatched'))),
  CONSTRAINT run_cancellation_dispatches_settled CHECK ((status = 'settled') = (settled_at_ms IS NOT NULL))
);
CREATE INDEX run_cancellation_dispatches_due_at ON run_cancellation_dispatches (next_attempt_at_ms, attempt_id)
  WHERE next_attempt_at_ms IS NOT NULL;
CREATE INDEX run_cancellation_dispatches_worker ON run_cancellation_dispatches (worker_id, attempt_id)
  WHERE settled_at_ms IS NULL;

-- A run that waits for an approval: the order to the approval service stays open here until it is answered.
CREATE TABLE run_holds (
  run_id TEXT PRIMARY KEY REFERENCES runs (id),
  order_id TEXT NOT NULL UNIQUE,
  action_digest TEXT NOT NULL CHECK (length(action_digest) = 64),
  expires_at_ms BIGINT NOT NULL CHECK (expires_at_ms >= 0),
  rings INTEGER NOT NULL DEFAULT 0 CHECK (rings >= 0),
  next_ring_at_ms BIGINT CHECK (next_ring_at_ms >= 0),
  closed_at_ms BIGINT CHECK (closed_at_ms >= 0)
);
CREATE INDEX run_holds_due ON run_holds (next_ring_at_ms, run_id) WHERE next_ring_at_ms IS NOT NULL;
CREATE INDEX run_holds_expiry ON run_holds (expires_at_ms, run_id) WHERE closed_at_ms IS NULL;

-- What was committed for an approved action's dispatch id; `closed` is a tombstone that refuses a later release or create.
CREATE TABLE approved_run_action_receipts (
  dispatch_id TEXT PRIMARY KEY,
  project_id TEXT NOT NULL,
  run_id TEXT,
  approval_id TEXT,
  action_digest TEXT,
  outcome TEXT NOT NULL CHECK (outcome IN ('released', 'ended', 'closed')),
  run_status TEXT,
  evidence_digest TEXT NOT NULL CHECK (length(evidence_digest) = 64),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0)
);
CREATE INDEX approved_run_action_receipts_run ON approved_run_action_receipts (run_id) WHERE run_id IS NOT NULL;

-- When this ledger was last looked after; an old stamp means that our own outage, not the workers', aged the leases.
CREATE TABLE dispatcher_stamp (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  alive_at_ms BIGINT NOT NULL CHECK (alive_at_ms >= 0)
);
INSERT INTO dispatcher_stamp (id, alive_at_ms) VALUES (1, 0);
