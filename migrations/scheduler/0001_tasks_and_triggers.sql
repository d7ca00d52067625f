-- Tasks with immutable revisions, triggers, their schedules, and the orders for runs that come of them.
-- Times are milliseconds UTC; flags are 0 or 1; JSON is canonical and kept as text.
-- ql3: append-only task_revisions
-- ql3: append-only task_execution_revisions
-- ql3: append-only execution_context_recipes
-- ql3: append-only trigger_revisions

CREATE TABLE task_definitions (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  project TEXT NOT NULL CHECK (length(project) BETWEEN 1 AND 63),
  name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 63),
  revision BIGINT NOT NULL CHECK (revision >= 1),
  version BIGINT NOT NULL CHECK (version >= revision),
  enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
  deleted INTEGER NOT NULL DEFAULT 0 CHECK (deleted IN (0, 1)),
  folder TEXT,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= created_at_ms),
  CONSTRAINT task_deleted_is_disabled CHECK (deleted = 0 OR enabled = 0)
);
CREATE UNIQUE INDEX task_definitions_name ON task_definitions (project, name) WHERE deleted = 0;
CREATE INDEX task_definitions_folder ON task_definitions (project, folder, name) WHERE deleted = 0;

-- The labels of a task's current revision, for lists.
CREATE TABLE task_labels (
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  PRIMARY KEY (task_id, name)
);
CREATE INDEX task_labels_value ON task_labels (name, value, task_id);

CREATE TABLE task_revisions (
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  revision BIGINT NOT NULL CHECK (revision >= 1),
  spec TEXT NOT NULL,
  content_digest TEXT NOT NULL CHECK (length(content_digest) = 64),
  mutation_id TEXT UNIQUE,
  request_digest TEXT NOT NULL CHECK (length(request_digest) = 64),
  created_by_type TEXT NOT NULL,
  created_by_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  PRIMARY KEY (task_id, revision)
);

-- What a revision executes, compiled. A run pins it by digest; a later edit never changes it.
CREATE TABLE task_execution_revisions (
  project TEXT NOT NULL,
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  task_revision BIGINT NOT NULL CHECK (task_revision >= 1),
  executor_type TEXT NOT NULL CHECK (length(executor_type) BETWEEN 1 AND 64),
  execution_template TEXT NOT NULL,
  context_ref TEXT NOT NULL CHECK (length(context_ref) <= 512),
  content_digest TEXT NOT NULL CHECK (length(content_digest) = 64),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  PRIMARY KEY (task_id, task_revision)
);
CREATE INDEX task_execution_revisions_created
  ON task_execution_revisions (project, created_at_ms, task_id, task_revision);

-- The environment that a revision asks for: public values and names of secrets, never a secret's value.
CREATE TABLE execution_context_recipes (
  context_ref TEXT PRIMARY KEY CHECK (length(context_ref) <= 512),
  environment_recipe TEXT NOT NULL,
  content_digest TEXT NOT NULL CHECK (length(content_digest) = 64),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0)
);

CREATE TABLE triggers (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  project TEXT NOT NULL CHECK (length(project) BETWEEN 1 AND 63),
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  kind TEXT NOT NULL,
  revision BIGINT NOT NULL CHECK (revision >= 1),
  version BIGINT NOT NULL CHECK (version >= revision),
  enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
  deleted INTEGER NOT NULL DEFAULT 0 CHECK (deleted IN (0, 1)),
  missed_count BIGINT NOT NULL DEFAULT 0 CHECK (missed_count >= 0),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= created_at_ms),
  CONSTRAINT trigger_deleted_is_disabled CHECK (deleted = 0 OR enabled = 0)
);
CREATE INDEX triggers_of_task ON triggers (task_id, id) WHERE deleted = 0;
CREATE INDEX triggers_of_project ON triggers (project, id) WHERE deleted = 0;
CREATE INDEX triggers_of_kind ON triggers (kind, id) WHERE deleted = 0 AND kind IN ('boot', 'after_task');

CREATE TABLE trigger_revisions (
  trigger_id TEXT NOT NULL REFERENCES triggers (id),
  revision BIGINT NOT NULL CHECK (revision >= 1),
  spec TEXT NOT NULL,
  content_digest TEXT NOT NULL CHECK (length(content_digest) = 64),
  mutation_id TEXT UNIQUE,
  request_digest TEXT NOT NULL CHECK (length(request_digest) = 64),
  created_by_type TEXT NOT NULL,
  created_by_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  PRIMARY KEY (trigger_id, revision)
);

-- One row a trigger on the calendar. Everything up to `decided_through_ms` is admitted or missed; `wake_at_ms` is when
-- a scheduler has to look again, null sleeps. While it is stopped, all from `stopped_at_ms` on is missed.
CREATE TABLE schedules (
  trigger_id TEXT PRIMARY KEY REFERENCES triggers (id),
  project TEXT NOT NULL,
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  trigger_revision BIGINT NOT NULL CHECK (trigger_revision >= 1),
  anchor_ms BIGINT NOT NULL CHECK (anchor_ms >= 0),
  decided_through_ms BIGINT NOT NULL CHECK (decided_through_ms >= 0),
  next_fire_at_ms BIGINT CHECK (next_fire_at_ms >= 0),
  wake_at_ms BIGINT CHECK (wake_at_ms >= 0),
  last_scheduled_at_ms BIGINT CHECK (last_scheduled_at_ms >= 0),
  stopped_at_ms BIGINT CHECK (stopped_at_ms >= 0),
  stopped_by TEXT CHECK (stopped_by IN ('trigger_disabled', 'task_disabled', 'project_archived')),
  version BIGINT NOT NULL DEFAULT 0 CHECK (version >= 0),
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0),
  CONSTRAINT schedule_stop_pair CHECK ((stopped_at_ms IS NULL) = (stopped_by IS NULL)),
  CONSTRAINT schedule_next_while_running CHECK (next_fire_at_ms IS NULL OR stopped_by IS NULL)
);
CREATE INDEX schedules_wake ON schedules (wake_at_ms, trigger_id) WHERE wake_at_ms IS NOT NULL;
CREATE INDEX schedules_of_task ON schedules (task_id);

-- The wall time up to which schedules were decided, to know that the clock was set back meanwhile; and the last instant
-- whose admission was pruned, before which nothing is admitted again.
CREATE TABLE schedule_clock (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  seen_ms BIGINT NOT NULL CHECK (seen_ms >= 0),
  pruned_through_ms BIGINT NOT NULL CHECK (pruned_through_ms >= 0)
);
INSERT INTO schedule_clock (id, seen_ms, pruned_through_ms) VALUES (1, 0, 0);

-- An order for one run, open until the dispatcher has committed the run (or, withdrawing, its end). `id` is the order's.
CREATE TABLE schedule_admissions (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  run_id TEXT NOT NULL UNIQUE CHECK (length(run_id) = 36),
  project TEXT NOT NULL,
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  task_revision BIGINT NOT NULL CHECK (task_revision >= 1),
  trigger_id TEXT REFERENCES triggers (id),
  trigger_revision BIGINT CHECK (trigger_revision >= 1),
  scheduled_for_ms BIGINT CHECK (scheduled_for_ms >= 0),
  not_before_ms BIGINT CHECK (not_before_ms >= 0),
  idempotency_key TEXT NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  request_digest TEXT NOT NULL CHECK (length(request_digest) = 64),
  run_order TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('open', 'committed', 'refused', 'withdrawing', 'withdrawn')),
  error_code TEXT,
  rings INTEGER NOT NULL DEFAULT 1 CHECK (rings >= 1),
  ring_at_ms BIGINT CHECK (ring_at_ms >= 0),
  created_at_ms BIGINT NOT NULL CHECK (created_at_ms >= 0),
  closed_at_ms BIGINT CHECK (closed_at_ms >= 0),
  CONSTRAINT admission_rings_while_open CHECK ((ring_at_ms IS NOT NULL) = (status IN ('open', 'withdrawing'))),
  CONSTRAINT admission_closed_has_time CHECK ((closed_at_ms IS NULL) = (status IN ('open', 'withdrawing'))),
  CONSTRAINT admission_of_trigger CHECK ((trigger_id IS NULL) = (trigger_revision IS NULL)),
  CONSTRAINT admission_error CHECK ((error_code IS NOT NULL) = (status = 'refused'))
);
CREATE UNIQUE INDEX schedule_admissions_key ON schedule_admissions (project, idempotency_key);
CREATE UNIQUE INDEX schedule_admissions_instant ON schedule_admissions (trigger_id, scheduled_for_ms)
  WHERE trigger_id IS NOT NULL AND scheduled_for_ms IS NOT NULL;
CREATE INDEX schedule_admissions_ring ON schedule_admissions (ring_at_ms, id) WHERE ring_at_ms IS NOT NULL;
CREATE INDEX schedule_admissions_closed ON schedule_admissions (closed_at_ms, id) WHERE closed_at_ms IS NOT NULL;
CREATE INDEX schedule_admissions_of_task ON schedule_admissions (task_id, not_before_ms) WHERE not_before_ms IS NOT NULL;

-- Instants that did not become runs, and why. Neighbouring ones with one cause share a row.
CREATE TABLE missed_fires (
  id TEXT PRIMARY KEY CHECK (length(id) = 36),
  trigger_id TEXT NOT NULL REFERENCES triggers (id),
  task_id TEXT NOT NULL REFERENCES task_definitions (id),
  project TEXT NOT NULL,
  trigger_revision BIGINT NOT NULL CHECK (trigger_revision >= 1),
  cause TEXT NOT NULL CHECK (length(cause) BETWEEN 1 AND 64),
  first_ms BIGINT NOT NULL CHECK (first_ms >= 0),
  last_ms BIGINT NOT NULL CHECK (last_ms >= first_ms),
  count BIGINT NOT NULL CHECK (count >= 1),
  at_least INTEGER NOT NULL CHECK (at_least IN (0, 1)),
  recorded_at_ms BIGINT NOT NULL CHECK (recorded_at_ms >= 0)
);
CREATE INDEX missed_fires_of_project ON missed_fires (project, id);
CREATE INDEX missed_fires_of_trigger ON missed_fires (trigger_id, id);
