-- Who there is, in which projects, with which roles. Times are milliseconds UTC; history tables only grow.

CREATE TABLE identity_subjects (
  type TEXT NOT NULL,
  id TEXT NOT NULL,
  display_name TEXT,
  status TEXT NOT NULL,
  version INTEGER NOT NULL,
  created_at_ms BIGINT NOT NULL,
  updated_at_ms BIGINT NOT NULL,
  PRIMARY KEY (type, id),
  CONSTRAINT identity_subject_type_check
    CHECK (type IN ('user', 'api_app', 'mcp_client', 'agent', 'worker', 'system')),
  CONSTRAINT identity_subject_id_check CHECK (length(id) BETWEEN 1 AND 255),
  CONSTRAINT identity_subject_name_check CHECK (display_name IS NULL OR length(display_name) <= 255),
  CONSTRAINT identity_subject_status_check CHECK (status IN ('active', 'disabled')),
  CONSTRAINT identity_subject_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT identity_subject_created_at_check CHECK (created_at_ms >= 0),
  CONSTRAINT identity_subject_updated_at_check CHECK (updated_at_ms >= created_at_ms)
);
CREATE INDEX identity_subject_status_idx ON identity_subjects (type, status, id);

CREATE TABLE identity_authentication_bindings (
  provider TEXT NOT NULL,
  provider_subject TEXT NOT NULL,
  version INTEGER NOT NULL,
  state TEXT NOT NULL,
  subject_type TEXT NOT NULL,
  subject_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  PRIMARY KEY (provider, provider_subject, version),
  CONSTRAINT identity_auth_binding_subject_fk FOREIGN KEY (subject_type, subject_id)
    REFERENCES identity_subjects (type, id) ON DELETE RESTRICT,
  CONSTRAINT identity_auth_binding_provider_check
    CHECK (length(provider) BETWEEN 1 AND 64 AND length(provider_subject) BETWEEN 1 AND 128),
  CONSTRAINT identity_auth_binding_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT identity_auth_binding_state_check CHECK (state IN ('active', 'revoked')),
  CONSTRAINT identity_auth_binding_created_at_check CHECK (created_at_ms >= 0)
);
CREATE INDEX identity_auth_binding_subject_idx
  ON identity_authentication_bindings (subject_type, subject_id, provider, provider_subject, version DESC);
-- ql3: append-only identity_authentication_bindings

CREATE TABLE projects (
  id TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL,
  status TEXT NOT NULL,
  version INTEGER NOT NULL,
  created_at_ms BIGINT NOT NULL,
  updated_at_ms BIGINT NOT NULL,
  CONSTRAINT projects_id_check CHECK (length(id) BETWEEN 1 AND 63),
  CONSTRAINT projects_name_check CHECK (length(name) BETWEEN 1 AND 255),
  CONSTRAINT projects_status_check CHECK (status IN ('active', 'archived')),
  CONSTRAINT projects_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT projects_created_at_check CHECK (created_at_ms >= 0),
  CONSTRAINT projects_updated_at_check CHECK (updated_at_ms >= created_at_ms)
);
INSERT INTO projects (id, name, status, version, created_at_ms, updated_at_ms)
  VALUES ('default', 'Default', 'active', 1, 0, 0);

CREATE TABLE project_role_bindings (
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  subject_type TEXT NOT NULL,
  subject_id TEXT NOT NULL,
  version INTEGER NOT NULL,
  state TEXT NOT NULL,
  role TEXT,
  mutation_id TEXT NOT NULL,
  changed_by_type TEXT NOT NULL,
  changed_by_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  PRIMARY KEY (project_id, subject_type, subject_id, version),
  CONSTRAINT project_role_bindings_subject_type_check
    CHECK (subject_type IN ('user', 'api_app', 'mcp_client', 'agent', 'worker', 'system')),
  CONSTRAINT project_role_bindings_subject_id_check CHECK (length(subject_id) BETWEEN 1 AND 255),
  CONSTRAINT project_role_bindings_changed_by_type_check
    CHECK (changed_by_type IN ('user', 'api_app', 'mcp_client', 'agent', 'worker', 'system')),
  CONSTRAINT project_role_bindings_state_check CHECK (state IN ('active', 'revoked')),
  CONSTRAINT project_role_bindings_role_check CHECK (
    (state = 'active' AND role IS NOT NULL AND role IN ('owner', 'admin', 'operator', 'viewer'))
    OR (state = 'revoked' AND role IS NULL)
  ),
  -- Owners answer for a project and decide about it: only people do.
  CONSTRAINT project_role_bindings_owner_check CHECK (role IS NULL OR role <> 'owner' OR subject_type = 'user'),
  CONSTRAINT project_role_bindings_mutation_check CHECK (length(mutation_id) BETWEEN 1 AND 64),
  CONSTRAINT project_role_bindings_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT project_role_bindings_created_at_check CHECK (created_at_ms >= 0)
);
CREATE UNIQUE INDEX project_role_binding_mutation_uidx ON project_role_bindings (project_id, mutation_id);
CREATE INDEX project_role_binding_subject_idx
  ON project_role_bindings (subject_type, subject_id, project_id, version DESC);
-- ql3: append-only project_role_bindings

CREATE TABLE project_owner_bootstrap_challenges (
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  version INTEGER NOT NULL,
  challenge_id TEXT NOT NULL,
  token_digest TEXT NOT NULL,
  issued_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  consumed_at_ms BIGINT,
  claimed_subject_type TEXT,
  claimed_subject_id TEXT,
  PRIMARY KEY (project_id, version),
  CONSTRAINT project_owner_bootstrap_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT project_owner_bootstrap_challenge_check CHECK (length(challenge_id) = 22),
  CONSTRAINT project_owner_bootstrap_digest_check
    CHECK (length(token_digest) = 64 AND trim(token_digest, '0123456789abcdef') = ''),
  CONSTRAINT project_owner_bootstrap_issued_at_check CHECK (issued_at_ms >= 0),
  CONSTRAINT project_owner_bootstrap_lifetime_check
    CHECK (expires_at_ms > issued_at_ms AND expires_at_ms <= issued_at_ms + 600000),
  CONSTRAINT project_owner_bootstrap_claim_tuple_check CHECK (
    (consumed_at_ms IS NULL AND claimed_subject_type IS NULL AND claimed_subject_id IS NULL)
    OR (consumed_at_ms IS NOT NULL AND claimed_subject_type IS NOT NULL AND claimed_subject_id IS NOT NULL)
  ),
  CONSTRAINT project_owner_bootstrap_claimed_subject_type_check
    CHECK (claimed_subject_type IS NULL OR claimed_subject_type = 'user'),
  CONSTRAINT project_owner_bootstrap_claim_time_check
    CHECK (consumed_at_ms IS NULL OR (consumed_at_ms >= issued_at_ms AND consumed_at_ms < expires_at_ms))
);
CREATE UNIQUE INDEX project_owner_bootstrap_challenge_id_uidx ON project_owner_bootstrap_challenges (challenge_id);

-- A project's own rules: the whole set as one document a version; the highest version is in force.
CREATE TABLE project_rules (
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  version INTEGER NOT NULL,
  rules TEXT NOT NULL,
  mutation_id TEXT NOT NULL,
  changed_by_type TEXT NOT NULL,
  changed_by_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  PRIMARY KEY (project_id, version),
  CONSTRAINT project_rules_version_check CHECK (version BETWEEN 1 AND 2147483647),
  CONSTRAINT project_rules_size_check CHECK (length(rules) BETWEEN 2 AND 65536),
  CONSTRAINT project_rules_created_at_check CHECK (created_at_ms >= 0)
);
CREATE UNIQUE INDEX project_rules_mutation_uidx ON project_rules (project_id, mutation_id);
-- ql3: append-only project_rules
