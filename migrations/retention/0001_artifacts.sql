-- One row per attempt that ended with a log, made from the dispatcher's facts.
CREATE TABLE artifacts (
    id               TEXT    NOT NULL PRIMARY KEY CHECK (length(id) = 36),
    project          TEXT    NOT NULL CHECK (length(project) BETWEEN 1 AND 128),
    run_id           TEXT    NOT NULL CHECK (length(run_id) = 36),
    attempt_id       TEXT    NOT NULL CHECK (length(attempt_id) = 36),
    task_id          TEXT    NOT NULL CHECK (length(task_id) = 36),
    worker_id        TEXT    NOT NULL CHECK (length(worker_id) BETWEEN 1 AND 63),
    kind             TEXT    NOT NULL CHECK (kind IN ('log', 'file', 'report')),
    -- pending: not seen in the store yet; missing: looked for in vain for a day, still looked for now and then
    state            TEXT    NOT NULL CHECK (state IN ('pending', 'stored', 'missing', 'gone')),
    size             BIGINT  NOT NULL CHECK (size >= 0),
    produced         BIGINT  NOT NULL CHECK (produced >= size),
    sha256           TEXT    CHECK (length(sha256) = 64),
    truncated        INTEGER NOT NULL CHECK (truncated IN (0, 1)),
    run_terminal     INTEGER NOT NULL CHECK (run_terminal IN (0, 1)),
    finished_at_ms   BIGINT  NOT NULL CHECK (finished_at_ms >= 0),
    created_at_ms    BIGINT  NOT NULL CHECK (created_at_ms >= 0),
    stored_at_ms     BIGINT  CHECK (stored_at_ms >= 0),
    -- when to look for the file again; null once it needs no look
    look_at_ms       BIGINT  CHECK (look_at_ms >= 0),
    looks            INTEGER NOT NULL DEFAULT 0 CHECK (looks >= 0),
    CHECK ((state IN ('pending', 'missing')) = (look_at_ms IS NOT NULL))
);
CREATE UNIQUE INDEX artifacts_log_of_attempt ON artifacts (attempt_id) WHERE kind = 'log';
CREATE INDEX artifacts_of_run ON artifacts (project, run_id, id);
CREATE INDEX artifacts_run ON artifacts (run_id);
CREATE INDEX artifacts_to_look_for ON artifacts (look_at_ms, id) WHERE look_at_ms IS NOT NULL;
CREATE INDEX artifacts_by_age ON artifacts (project, finished_at_ms, id) WHERE state <> 'gone';

-- Permanent evidence that an artifact was retired; the first evidence stands.
CREATE TABLE artifact_retentions (
    artifact_id      TEXT    NOT NULL PRIMARY KEY,
    attempt_id       TEXT    NOT NULL,
    project          TEXT    NOT NULL,
    finished_at_ms   BIGINT  NOT NULL CHECK (finished_at_ms >= 0),
    eligible_at_ms   BIGINT  NOT NULL CHECK (eligible_at_ms >= finished_at_ms),
    recorded_at_ms   BIGINT  NOT NULL CHECK (recorded_at_ms >= eligible_at_ms),
    disposition      TEXT    NOT NULL CHECK (disposition IN ('deleted', 'already_absent')),
    bytes_reclaimed  BIGINT  NOT NULL CHECK (bytes_reclaimed >= 0),
    CHECK (disposition = 'deleted' OR bytes_reclaimed = 0)
);
-- ql3: append-only artifact_retentions
-- ql3: purgeable artifact_retentions by artifact_id before recorded_at_ms
CREATE INDEX artifact_retentions_recorded ON artifact_retentions (recorded_at_ms, artifact_id);

-- Where the sweep of a project's logs stands; a half cursor cannot be.
CREATE TABLE artifact_maintenance_cursors (
    project               TEXT   NOT NULL PRIMARY KEY,
    cursor_finished_at_ms BIGINT,
    cursor_artifact_id    TEXT,
    version               BIGINT NOT NULL CHECK (version >= 1),
    updated_at_ms         BIGINT NOT NULL CHECK (updated_at_ms >= 0),
    CHECK ((cursor_finished_at_ms IS NULL) = (cursor_artifact_id IS NULL))
);

-- Null ages mean the default of the profile. A row stands for every project of which a fact was seen.
CREATE TABLE retention_policies (
    project       TEXT   NOT NULL PRIMARY KEY CHECK (length(project) BETWEEN 1 AND 128),
    logs_ms       BIGINT CHECK (logs_ms >= 3600000),
    runs_ms       BIGINT CHECK (runs_ms >= 3600000),
    version       BIGINT NOT NULL CHECK (version >= 0),
    updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0),
    CHECK ((logs_ms IS NULL) = (runs_ms IS NULL)),
    CHECK (runs_ms >= logs_ms)
);

-- What must not be removed, whatever its age: a run, or a whole project (run_id = '').
CREATE TABLE holds (
    project       TEXT   NOT NULL,
    run_id        TEXT   NOT NULL,
    reason        TEXT   NOT NULL CHECK (length(reason) <= 1024),
    held_by       TEXT   NOT NULL,
    held_at_ms    BIGINT NOT NULL CHECK (held_at_ms >= 0),
    PRIMARY KEY (project, run_id)
);

-- Open orders to workers: drop your copy. Removed when the worker has answered.
CREATE TABLE retire_orders (
    attempt_id    TEXT    NOT NULL PRIMARY KEY,
    worker_id     TEXT    NOT NULL,
    artifact_id   TEXT    NOT NULL,
    ring_at_ms    BIGINT  NOT NULL CHECK (ring_at_ms >= 0),
    rings         INTEGER NOT NULL DEFAULT 0 CHECK (rings >= 0),
    created_at_ms BIGINT  NOT NULL CHECK (created_at_ms >= 0)
);
CREATE INDEX retire_orders_due ON retire_orders (ring_at_ms, attempt_id);

-- How many attempts ended in an hour and are not purged yet: tells which purge orders are worth sending.
CREATE TABLE ended_hours (
    project  TEXT    NOT NULL,
    hour_ms  BIGINT  NOT NULL CHECK (hour_ms >= 0),
    attempts BIGINT  NOT NULL,
    PRIMARY KEY (project, hour_ms)
);

-- At most one open purge order to the dispatcher for each project.
CREATE TABLE purge_orders (
    project            TEXT    NOT NULL PRIMARY KEY,
    order_id           TEXT    NOT NULL UNIQUE,
    hour_ms            BIGINT  NOT NULL,
    finished_before_ms BIGINT  NOT NULL,
    ring_at_ms         BIGINT  NOT NULL,
    rings              INTEGER NOT NULL DEFAULT 0
);

-- How far the facts of another service were read.
CREATE TABLE feed_positions (
    source        TEXT   NOT NULL PRIMARY KEY,
    position      TEXT   NOT NULL,
    updated_at_ms BIGINT NOT NULL
);
