-- What every service's schema holds before its own tables.
-- ql3: read-only schema_migrations
-- ql3: read-only schema_capabilities
-- ql3: read-only kit_clock
-- ql3: append-only audit_events
-- ql3: append-only audit_seals
-- ql3: append-only audit_checkpoints
-- ql3: purgeable audit_events by id before occurred_at_ms
-- ql3: purgeable audit_seals by event_id before sealed_at_ms

-- The server's clock is the database's clock. `shift_ms` stays 0 outside tests; the service's role cannot write it.
CREATE TABLE kit_clock (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  shift_ms BIGINT NOT NULL
);
INSERT INTO kit_clock (id, shift_ms) VALUES (1, 0);

CREATE FUNCTION kit_now_ms() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + shift_ms FROM kit_clock
$$;

-- What goes out over the bus, written in the transaction of what it tells. (xid, id) is the feed's order: rows of a
-- transaction that began earlier come first, and none is shown before every earlier transaction has ended.
CREATE TABLE outbox (
  id TEXT PRIMARY KEY,
  xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
  kind TEXT NOT NULL CHECK (kind IN ('fact', 'order')),
  subject TEXT NOT NULL,
  message_schema TEXT NOT NULL,
  payload TEXT NOT NULL,
  traceparent TEXT,
  created_at_ms BIGINT NOT NULL,
  published_at_ms BIGINT
);
CREATE INDEX outbox_unpublished ON outbox (id) WHERE published_at_ms IS NULL;
CREATE INDEX outbox_feed ON outbox (xid, id);

-- The feed cursor of the last pruned row: a reader that is behind it has missed something.
CREATE TABLE outbox_pruned (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  through TEXT NOT NULL
);
INSERT INTO outbox_pruned (id, through) VALUES (1, '');

CREATE TABLE audit_events (
  id TEXT PRIMARY KEY,
  occurred_at_ms BIGINT NOT NULL,
  actor_type TEXT,
  actor_id TEXT,
  authentication_id TEXT,
  action TEXT NOT NULL,
  project TEXT,
  target TEXT,
  decision TEXT NOT NULL,
  detail TEXT NOT NULL
);
CREATE INDEX audit_events_project ON audit_events (project, id);

-- Events that the sealer has not chained yet; a queue, so that an event whose transaction commits late is never passed over.
CREATE TABLE audit_unsealed (
  event_id TEXT PRIMARY KEY
);

CREATE TABLE audit_seals (
  position BIGINT PRIMARY KEY,
  event_id TEXT NOT NULL,
  event_digest TEXT NOT NULL,
  hash TEXT NOT NULL,
  sealed_at_ms BIGINT NOT NULL
);
CREATE UNIQUE INDEX audit_seals_event ON audit_seals (event_id);

-- The end of the chain. Losing the last seals shows because this row remembers them.
CREATE TABLE audit_head (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  position BIGINT NOT NULL,
  hash TEXT NOT NULL
);
INSERT INTO audit_head (id, position, hash) VALUES (1, 0, '');

-- Where a purge cut the chain: the seal at `position` and all before it are gone on purpose.
CREATE TABLE audit_checkpoints (
  position BIGINT PRIMARY KEY,
  hash TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL
);
