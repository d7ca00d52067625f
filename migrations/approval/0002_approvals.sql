-- Requests, decisions, approved actions and their recovery. The application supplies every value.

CREATE TABLE approved_action_plans (
  action_ref TEXT NOT NULL PRIMARY KEY,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  action_type TEXT NOT NULL,
  action_digest TEXT NOT NULL,
  -- What was asked for, word for word: a plan pins what the words meant at that time.
  ask_digest TEXT NOT NULL,
  plan TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_plan_ref_check CHECK (length(action_ref) BETWEEN 1 AND 255),
  CONSTRAINT approved_action_plan_digest_check
    CHECK (length(action_digest) = 64 AND trim(action_digest, '0123456789abcdef') = ''),
  CONSTRAINT approved_action_plan_size_check CHECK (length(plan) BETWEEN 2 AND 131072)
);
-- ql3: append-only approved_action_plans

CREATE TABLE approval_requests (
  id TEXT NOT NULL PRIMARY KEY,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  version INTEGER NOT NULL,
  state TEXT NOT NULL,
  mode TEXT NOT NULL,
  quorum INTEGER NOT NULL,
  decider_role TEXT,
  rule TEXT,
  permission TEXT NOT NULL,
  action_type TEXT NOT NULL,
  action_ref TEXT NOT NULL,
  action_digest TEXT NOT NULL,
  preview_digest TEXT NOT NULL,
  preview TEXT NOT NULL,
  risk TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  requested_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  decision_id TEXT,
  decision TEXT,
  decision_reason TEXT,
  decided_by_type TEXT,
  decided_by_id TEXT,
  decided_at_ms BIGINT,
  consumption_id TEXT,
  dispatch_id TEXT,
  consumed_by_type TEXT,
  consumed_by_id TEXT,
  consumed_at_ms BIGINT,
  withdrawal_id TEXT,
  withdrawn_by_type TEXT,
  withdrawn_by_id TEXT,
  withdrawn_at_ms BIGINT,
  -- When to try the consumption again, and why the last try was refused. Bookkeeping, not authority.
  consume_after_ms BIGINT,
  consume_refusal TEXT,
  CONSTRAINT approval_request_id_check CHECK (length(id) BETWEEN 1 AND 64),
  CONSTRAINT approval_request_version_check CHECK (version BETWEEN 1 AND 3),
  CONSTRAINT approval_request_state_check
    CHECK (state IN ('pending', 'approved', 'rejected', 'consumed', 'withdrawn')),
  CONSTRAINT approval_request_mode_check CHECK (mode IN ('human_confirmation', 'separation_of_duty')),
  CONSTRAINT approval_request_quorum_check CHECK (quorum BETWEEN 1 AND 16),
  CONSTRAINT approval_request_decider_role_check
    CHECK (decider_role IS NULL OR decider_role IN ('owner', 'admin')),
  CONSTRAINT approval_request_binding_check CHECK (
    length(permission) BETWEEN 1 AND 255 AND length(action_type) BETWEEN 1 AND 64
    AND length(action_ref) BETWEEN 1 AND 255
    AND length(action_digest) = 64 AND trim(action_digest, '0123456789abcdef') = ''
    AND length(preview_digest) = 64 AND trim(preview_digest, '0123456789abcdef') = ''
    AND length(preview) BETWEEN 2 AND 8192
  ),
  CONSTRAINT approval_request_risk_check CHECK (risk IN ('low', 'medium', 'high', 'critical')),
  CONSTRAINT approval_request_requester_type_check
    CHECK (requested_by_type IN ('user', 'api_app', 'mcp_client', 'agent', 'worker', 'system')),
  CONSTRAINT approval_request_lifetime_check CHECK (
    requested_at_ms >= 0 AND expires_at_ms > requested_at_ms AND expires_at_ms <= requested_at_ms + 86400000
  ),
  CONSTRAINT approval_request_decision_tuple_check CHECK (
    (decision_id IS NULL AND decision IS NULL AND decided_by_type IS NULL AND decided_by_id IS NULL
      AND decided_at_ms IS NULL AND decision_reason IS NULL)
    OR (decision_id IS NOT NULL AND decision IS NOT NULL AND decided_by_type IS NOT NULL
      AND decided_by_id IS NOT NULL AND decided_at_ms IS NOT NULL)
  ),
  CONSTRAINT approval_request_decision_value_check
    CHECK (decision IS NULL OR decision IN ('approved', 'rejected')),
  CONSTRAINT approval_request_decided_by_type_check CHECK (decided_by_type IS NULL OR decided_by_type = 'user'),
  CONSTRAINT approval_request_decision_time_check CHECK (
    decided_at_ms IS NULL OR (decided_at_ms >= requested_at_ms AND decided_at_ms < expires_at_ms)
  ),
  CONSTRAINT approval_request_self_decision_check CHECK (
    mode <> 'separation_of_duty' OR decided_by_id IS NULL
    OR decided_by_type <> requested_by_type OR decided_by_id <> requested_by_id
  ),
  CONSTRAINT approval_request_consumption_tuple_check CHECK (
    (consumption_id IS NULL AND dispatch_id IS NULL AND consumed_by_type IS NULL AND consumed_by_id IS NULL
      AND consumed_at_ms IS NULL)
    OR (consumption_id IS NOT NULL AND dispatch_id IS NOT NULL AND consumed_by_type IS NOT NULL
      AND consumed_by_id IS NOT NULL AND consumed_at_ms IS NOT NULL)
  ),
  CONSTRAINT approval_request_consumed_by_type_check
    CHECK (consumed_by_type IS NULL OR consumed_by_type IN ('system', 'worker')),
  CONSTRAINT approval_request_consumption_time_check CHECK (
    consumed_at_ms IS NULL OR (consumed_at_ms >= decided_at_ms AND consumed_at_ms < expires_at_ms)
  ),
  CONSTRAINT approval_request_withdrawal_tuple_check CHECK (
    (withdrawal_id IS NULL AND withdrawn_by_type IS NULL AND withdrawn_by_id IS NULL AND withdrawn_at_ms IS NULL)
    OR (withdrawal_id IS NOT NULL AND withdrawn_by_type IS NOT NULL AND withdrawn_by_id IS NOT NULL
      AND withdrawn_at_ms IS NOT NULL)
  ),
  CONSTRAINT approval_request_withdrawal_time_check CHECK (
    withdrawn_at_ms IS NULL OR (withdrawn_at_ms >= requested_at_ms AND withdrawn_at_ms < expires_at_ms)
  ),
  CONSTRAINT approval_request_state_tuple_check CHECK (
    (state = 'pending' AND version = 1 AND decision_id IS NULL AND consumption_id IS NULL AND withdrawal_id IS NULL)
    OR (state = 'approved' AND version = 2 AND decision IS NOT NULL AND decision = 'approved'
      AND consumption_id IS NULL AND withdrawal_id IS NULL)
    OR (state = 'rejected' AND version = 2 AND decision IS NOT NULL AND decision = 'rejected'
      AND consumption_id IS NULL AND withdrawal_id IS NULL)
    OR (state = 'consumed' AND version = 3 AND decision IS NOT NULL AND decision = 'approved'
      AND consumption_id IS NOT NULL AND withdrawal_id IS NULL)
    OR (state = 'withdrawn' AND withdrawal_id IS NOT NULL AND consumption_id IS NULL
      AND ((version = 2 AND decision_id IS NULL)
        OR (version = 3 AND decision IS NOT NULL AND decision = 'approved')))
  )
);
CREATE UNIQUE INDEX approval_request_decision_id_uidx ON approval_requests (decision_id);
CREATE UNIQUE INDEX approval_request_consumption_id_uidx ON approval_requests (consumption_id);
CREATE UNIQUE INDEX approval_request_withdrawal_id_uidx ON approval_requests (withdrawal_id);
CREATE UNIQUE INDEX approval_request_decider_rule_uidx
  ON approval_requests (id, mode, requested_by_type, requested_by_id);
CREATE INDEX approval_request_list_idx ON approval_requests (project_id, requested_at_ms DESC, id DESC);
CREATE INDEX approval_request_state_idx ON approval_requests (project_id, state, requested_at_ms DESC, id DESC);
CREATE INDEX approval_request_pending_idx ON approval_requests (project_id, state, expires_at_ms, id);
CREATE INDEX approval_request_requester_idx
  ON approval_requests (project_id, requested_by_type, requested_by_id, requested_at_ms DESC, id);
CREATE INDEX approval_request_consume_idx ON approval_requests (consume_after_ms, id)
  WHERE state = 'approved';
CREATE INDEX approval_request_expiry_idx ON approval_requests (expires_at_ms, id)
  WHERE state IN ('pending', 'approved');

-- One row a human. The request's mode and requester are repeated under a foreign key, so that the rule about
-- self-decision holds in the database and not only in the code.
CREATE TABLE approval_decisions (
  id TEXT NOT NULL PRIMARY KEY,
  request_id TEXT NOT NULL,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  mode TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  decision TEXT NOT NULL,
  reason TEXT,
  decided_by_type TEXT NOT NULL,
  decided_by_id TEXT NOT NULL,
  authentication_id TEXT NOT NULL,
  assurance TEXT NOT NULL,
  authenticated_at_ms BIGINT NOT NULL,
  project_version INTEGER NOT NULL,
  binding_version INTEGER,
  decided_at_ms BIGINT NOT NULL,
  CONSTRAINT approval_decision_request_fk FOREIGN KEY (request_id, mode, requested_by_type, requested_by_id)
    REFERENCES approval_requests (id, mode, requested_by_type, requested_by_id) ON DELETE RESTRICT,
  CONSTRAINT approval_decision_value_check CHECK (decision IN ('approved', 'rejected')),
  CONSTRAINT approval_decision_reason_check CHECK (reason IS NULL OR length(reason) <= 1024),
  CONSTRAINT approval_decision_human_check CHECK (decided_by_type = 'user'),
  CONSTRAINT approval_decision_self_check CHECK (
    mode <> 'separation_of_duty' OR decided_by_type <> requested_by_type OR decided_by_id <> requested_by_id
  ),
  CONSTRAINT approval_decision_console_check
    CHECK (mode <> 'separation_of_duty' OR decided_by_id <> 'local-console'),
  CONSTRAINT approval_decision_assurance_check
    CHECK (assurance IN ('multi_factor', 'hardware', 'local_console')),
  CONSTRAINT approval_decision_authenticated_check CHECK (authenticated_at_ms <= decided_at_ms),
  CONSTRAINT approval_decision_fence_check
    CHECK (project_version >= 1 AND (binding_version IS NULL OR binding_version >= 1))
);
CREATE UNIQUE INDEX approval_decision_person_uidx ON approval_decisions (request_id, decided_by_type, decided_by_id);
-- ql3: append-only approval_decisions

-- How a held run was told that it will not be released; open until the dispatcher answered.
CREATE TABLE approval_endings (
  request_id TEXT NOT NULL PRIMARY KEY REFERENCES approval_requests (id) ON DELETE RESTRICT,
  dispatch_id TEXT NOT NULL,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  outcome TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  due_at_ms BIGINT,
  tries INTEGER NOT NULL,
  answer TEXT,
  answered_at_ms BIGINT,
  CONSTRAINT approval_ending_outcome_check CHECK (outcome IN ('rejected', 'withdrawn', 'expired')),
  CONSTRAINT approval_ending_tries_check CHECK (tries >= 0),
  CONSTRAINT approval_ending_answer_check CHECK (
    (answered_at_ms IS NULL AND answer IS NULL AND due_at_ms IS NOT NULL)
    OR (answered_at_ms IS NOT NULL AND answer IS NOT NULL AND due_at_ms IS NULL)
  )
);
CREATE UNIQUE INDEX approval_ending_dispatch_uidx ON approval_endings (dispatch_id);
CREATE INDEX approval_ending_due_idx ON approval_endings (due_at_ms, request_id) WHERE answered_at_ms IS NULL;

CREATE TABLE approved_action_dispatches (
  id TEXT NOT NULL PRIMARY KEY,
  approval_request_id TEXT NOT NULL REFERENCES approval_requests (id) ON DELETE RESTRICT,
  approval_request_version INTEGER NOT NULL,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  state TEXT NOT NULL,
  permission TEXT NOT NULL,
  action_type TEXT NOT NULL,
  action_ref TEXT NOT NULL,
  action_digest TEXT NOT NULL,
  preview_digest TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  approved_by_type TEXT NOT NULL,
  approved_by_id TEXT NOT NULL,
  approved_assurance TEXT NOT NULL,
  approved_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  consumed_by_type TEXT NOT NULL,
  consumed_by_id TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_dispatch_version_check CHECK (approval_request_version = 3),
  CONSTRAINT approved_action_dispatch_state_check CHECK (state IN ('pending')),
  CONSTRAINT approved_action_dispatch_requester_type_check
    CHECK (requested_by_type IN ('user', 'api_app', 'mcp_client', 'agent', 'worker', 'system')),
  CONSTRAINT approved_action_dispatch_approver_type_check CHECK (approved_by_type = 'user'),
  CONSTRAINT approved_action_dispatch_assurance_check
    CHECK (approved_assurance IN ('multi_factor', 'hardware', 'local_console')),
  CONSTRAINT approved_action_dispatch_consumer_type_check CHECK (consumed_by_type IN ('system', 'worker')),
  CONSTRAINT approved_action_dispatch_created_at_check
    CHECK (created_at_ms >= approved_at_ms AND approved_at_ms >= 0 AND created_at_ms < expires_at_ms)
);
CREATE UNIQUE INDEX approved_action_dispatch_request_uidx ON approved_action_dispatches (approval_request_id);
CREATE INDEX approved_action_dispatch_project_idx ON approved_action_dispatches (project_id, created_at_ms DESC, id DESC);
-- ql3: append-only approved_action_dispatches

-- Times of this table and of the controls are the database's clock: leases are judged by it alone.
CREATE TABLE approved_action_dispatch_executions (
  dispatch_id TEXT NOT NULL PRIMARY KEY REFERENCES approved_action_dispatches (id) ON DELETE RESTRICT,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  status TEXT NOT NULL,
  version INTEGER NOT NULL,
  attempt_count INTEGER NOT NULL,
  max_attempts INTEGER NOT NULL,
  eligible_at_ms BIGINT,
  next_attempt_at_ms BIGINT,
  lease_owner TEXT,
  lease_token TEXT,
  lease_expires_at_ms BIGINT,
  started_at_ms BIGINT,
  result_mutation_id TEXT,
  last_result_code TEXT,
  completed_at_ms BIGINT,
  created_at_ms BIGINT NOT NULL,
  updated_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_execution_status_check
    CHECK (status IN ('pending', 'leased', 'executing', 'retry_wait', 'succeeded', 'failed', 'blocked')),
  CONSTRAINT approved_action_execution_version_check CHECK (version BETWEEN 0 AND 2147483647),
  CONSTRAINT approved_action_execution_attempt_count_check CHECK (attempt_count BETWEEN 0 AND 16),
  CONSTRAINT approved_action_execution_max_attempts_check CHECK (max_attempts BETWEEN 1 AND 16),
  CONSTRAINT approved_action_execution_attempt_budget_check CHECK (attempt_count <= max_attempts),
  CONSTRAINT approved_action_execution_lease_tuple_check CHECK (
    (lease_owner IS NULL AND lease_token IS NULL AND lease_expires_at_ms IS NULL)
    OR (lease_owner IS NOT NULL AND lease_token IS NOT NULL AND lease_expires_at_ms IS NOT NULL)
  ),
  CONSTRAINT approved_action_execution_lease_bound_check CHECK (
    lease_expires_at_ms IS NULL
    OR (lease_expires_at_ms > updated_at_ms AND lease_expires_at_ms <= updated_at_ms + 600000)
  ),
  CONSTRAINT approved_action_execution_created_at_check CHECK (created_at_ms >= 0),
  CONSTRAINT approved_action_execution_updated_at_check CHECK (updated_at_ms >= created_at_ms),
  CONSTRAINT approved_action_execution_started_at_check
    CHECK (started_at_ms IS NULL OR (started_at_ms >= created_at_ms AND started_at_ms <= updated_at_ms)),
  CONSTRAINT approved_action_execution_status_tuple_check CHECK (
    (status = 'pending' AND version = 0 AND attempt_count = 0 AND eligible_at_ms IS NOT NULL
      AND next_attempt_at_ms IS NULL AND lease_owner IS NULL AND started_at_ms IS NULL
      AND result_mutation_id IS NULL AND last_result_code IS NULL AND completed_at_ms IS NULL)
    OR (status = 'leased' AND lease_owner IS NOT NULL AND attempt_count >= 1
      AND eligible_at_ms IS NOT NULL AND eligible_at_ms = lease_expires_at_ms
      AND next_attempt_at_ms IS NULL AND started_at_ms IS NULL
      AND result_mutation_id IS NULL AND last_result_code IS NULL AND completed_at_ms IS NULL)
    OR (status = 'executing' AND lease_owner IS NOT NULL AND attempt_count >= 1 AND eligible_at_ms IS NULL
      AND next_attempt_at_ms IS NULL AND started_at_ms IS NOT NULL
      AND result_mutation_id IS NULL AND last_result_code IS NULL AND completed_at_ms IS NULL)
    OR (status = 'retry_wait' AND lease_owner IS NULL AND attempt_count >= 1 AND attempt_count < max_attempts
      AND eligible_at_ms IS NOT NULL AND next_attempt_at_ms IS NOT NULL AND eligible_at_ms = next_attempt_at_ms
      AND started_at_ms IS NULL AND result_mutation_id IS NOT NULL AND last_result_code IS NOT NULL
      AND completed_at_ms IS NULL)
    OR (status IN ('succeeded', 'failed', 'blocked') AND lease_owner IS NULL AND eligible_at_ms IS NULL
      AND next_attempt_at_ms IS NULL AND result_mutation_id IS NOT NULL AND last_result_code IS NOT NULL
      AND completed_at_ms IS NOT NULL AND completed_at_ms = updated_at_ms
      AND (status = 'blocked' OR started_at_ms IS NOT NULL))
  )
);
CREATE INDEX approved_action_execution_due_idx ON approved_action_dispatch_executions (eligible_at_ms, dispatch_id)
  WHERE status IN ('pending', 'leased', 'retry_wait');
CREATE INDEX approved_action_execution_lease_idx
  ON approved_action_dispatch_executions (lease_expires_at_ms, dispatch_id) WHERE status = 'executing';
CREATE INDEX approved_action_execution_project_idx
  ON approved_action_dispatch_executions (project_id, status, created_at_ms, dispatch_id);

CREATE TABLE approved_action_receipts (
  dispatch_id TEXT NOT NULL PRIMARY KEY REFERENCES approved_action_dispatches (id) ON DELETE RESTRICT,
  approval_request_id TEXT NOT NULL REFERENCES approval_requests (id) ON DELETE RESTRICT,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  schema_version INTEGER NOT NULL,
  action_type TEXT NOT NULL,
  action_digest TEXT NOT NULL,
  execution_attempt INTEGER NOT NULL,
  execution_version INTEGER NOT NULL,
  started_at_ms BIGINT NOT NULL,
  idempotency_key TEXT NOT NULL,
  outcome TEXT NOT NULL,
  result_code TEXT NOT NULL,
  resource_type TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  finished_at_ms BIGINT NOT NULL,
  evidence_digest TEXT NOT NULL,
  created_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_receipt_schema_version_check CHECK (schema_version = 1),
  CONSTRAINT approved_action_receipt_attempt_check CHECK (execution_attempt BETWEEN 1 AND 16),
  CONSTRAINT approved_action_receipt_version_check CHECK (execution_version BETWEEN 1 AND 2147483647),
  CONSTRAINT approved_action_receipt_idempotency_check CHECK (idempotency_key = dispatch_id),
  CONSTRAINT approved_action_receipt_outcome_check CHECK (outcome = 'succeeded'),
  CONSTRAINT approved_action_receipt_digest_check
    CHECK (length(evidence_digest) = 64 AND trim(evidence_digest, '0123456789abcdef') = ''),
  CONSTRAINT approved_action_receipt_timestamps_check
    CHECK (finished_at_ms >= started_at_ms AND created_at_ms = finished_at_ms)
);
CREATE INDEX approved_action_receipt_project_idx ON approved_action_receipts (project_id, created_at_ms, dispatch_id);
-- ql3: append-only approved_action_receipts

CREATE TABLE approved_action_recovery_controls (
  dispatch_id TEXT NOT NULL PRIMARY KEY
    REFERENCES approved_action_dispatch_executions (dispatch_id) ON DELETE RESTRICT,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  execution_version INTEGER NOT NULL,
  status TEXT NOT NULL,
  version INTEGER NOT NULL,
  next_scan_at_ms BIGINT,
  lease_owner TEXT,
  lease_token TEXT,
  lease_expires_at_ms BIGINT,
  finding_count INTEGER NOT NULL,
  last_finding_mutation_id TEXT,
  last_finding TEXT,
  last_result_code TEXT,
  last_evidence_digest TEXT,
  resolution_mutation_id TEXT,
  created_at_ms BIGINT NOT NULL,
  updated_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_recovery_status_check
    CHECK (status IN ('armed', 'leased', 'manual_required', 'resolved')),
  CONSTRAINT approved_action_recovery_execution_version_check CHECK (execution_version BETWEEN 1 AND 2147483647),
  CONSTRAINT approved_action_recovery_version_check CHECK (version BETWEEN 0 AND 2147483647),
  CONSTRAINT approved_action_recovery_finding_count_check CHECK (finding_count BETWEEN 0 AND 2147483647),
  CONSTRAINT approved_action_recovery_lease_tuple_check CHECK (
    (lease_owner IS NULL AND lease_token IS NULL AND lease_expires_at_ms IS NULL AND status <> 'leased')
    OR (lease_owner IS NOT NULL AND lease_token IS NOT NULL AND lease_expires_at_ms IS NOT NULL
      AND status = 'leased')
  ),
  CONSTRAINT approved_action_recovery_scan_check CHECK (
    (status = 'armed' AND next_scan_at_ms IS NOT NULL AND next_scan_at_ms > updated_at_ms)
    OR (status = 'leased' AND next_scan_at_ms IS NOT NULL AND next_scan_at_ms = lease_expires_at_ms)
    OR (status IN ('manual_required', 'resolved') AND next_scan_at_ms IS NULL)
  ),
  CONSTRAINT approved_action_recovery_finding_tuple_check CHECK (
    (last_finding_mutation_id IS NULL AND last_finding IS NULL AND last_result_code IS NULL AND finding_count = 0
      AND last_evidence_digest IS NULL)
    OR (last_finding_mutation_id IS NOT NULL AND last_finding IS NOT NULL AND last_result_code IS NOT NULL
      AND finding_count >= 1)
  ),
  CONSTRAINT approved_action_recovery_manual_check CHECK (status <> 'manual_required' OR finding_count >= 1),
  CONSTRAINT approved_action_recovery_finding_value_check CHECK (
    last_finding IS NULL OR last_finding IN
      ('verified_succeeded', 'verified_failed', 'still_running', 'missing', 'conflict', 'unsupported', 'unavailable')
  ),
  CONSTRAINT approved_action_recovery_evidence_digest_check CHECK (
    last_evidence_digest IS NULL
    OR (length(last_evidence_digest) = 64 AND trim(last_evidence_digest, '0123456789abcdef') = '')
  ),
  CONSTRAINT approved_action_recovery_resolution_mutation_tuple_check
    CHECK ((status = 'resolved') = (resolution_mutation_id IS NOT NULL)),
  CONSTRAINT approved_action_recovery_timestamps_check
    CHECK (created_at_ms >= 0 AND updated_at_ms >= created_at_ms)
);
CREATE INDEX approved_action_recovery_due_idx ON approved_action_recovery_controls (next_scan_at_ms, dispatch_id)
  WHERE status IN ('armed', 'leased');
CREATE INDEX approved_action_recovery_project_idx
  ON approved_action_recovery_controls (project_id, status, created_at_ms, dispatch_id);

CREATE TABLE approved_action_recovery_resolutions (
  dispatch_id TEXT NOT NULL PRIMARY KEY
    REFERENCES approved_action_recovery_controls (dispatch_id) ON DELETE RESTRICT,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  execution_version INTEGER NOT NULL,
  mutation_id TEXT NOT NULL,
  source TEXT NOT NULL,
  decision TEXT NOT NULL,
  evidence_digest TEXT,
  reason_code TEXT NOT NULL,
  resolved_by_type TEXT,
  resolved_by_id TEXT,
  resolved_at_ms BIGINT NOT NULL,
  CONSTRAINT approved_action_recovery_resolution_execution_version_check
    CHECK (execution_version BETWEEN 1 AND 2147483647),
  CONSTRAINT approved_action_recovery_resolution_source_check CHECK (source IN ('automatic_evidence', 'human')),
  CONSTRAINT approved_action_recovery_resolution_decision_check
    CHECK (decision IN ('confirm_succeeded', 'confirm_failed', 'abandon_unknown')),
  CONSTRAINT approved_action_recovery_resolution_actor_tuple_check CHECK (
    (resolved_by_type IS NULL AND resolved_by_id IS NULL)
    OR (resolved_by_type IS NOT NULL AND resolved_by_type = 'user' AND resolved_by_id IS NOT NULL)
  ),
  CONSTRAINT approved_action_recovery_resolution_source_tuple_check CHECK (
    (source = 'automatic_evidence' AND decision IN ('confirm_succeeded', 'confirm_failed')
      AND evidence_digest IS NOT NULL AND resolved_by_type IS NULL)
    OR (source = 'human' AND resolved_by_type IS NOT NULL)
  ),
  CONSTRAINT approved_action_recovery_resolution_evidence_digest_check CHECK (
    evidence_digest IS NULL OR (length(evidence_digest) = 64 AND trim(evidence_digest, '0123456789abcdef') = '')
  ),
  CONSTRAINT approved_action_recovery_resolution_time_check CHECK (resolved_at_ms >= 0)
);
CREATE UNIQUE INDEX approved_action_recovery_resolution_mutation_uidx
  ON approved_action_recovery_resolutions (mutation_id);
CREATE INDEX approved_action_recovery_resolution_project_idx
  ON approved_action_recovery_resolutions (project_id, resolved_at_ms, dispatch_id);
-- ql3: append-only approved_action_recovery_resolutions

CREATE TABLE approved_action_recovery_authorizations (
  dispatch_id TEXT NOT NULL PRIMARY KEY
    REFERENCES approved_action_recovery_resolutions (dispatch_id) ON DELETE RESTRICT,
  project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE RESTRICT,
  mutation_id TEXT NOT NULL,
  resolved_by_id TEXT NOT NULL,
  authentication_id TEXT NOT NULL,
  assurance TEXT NOT NULL,
  authenticated_at_ms BIGINT NOT NULL,
  authorized_at_ms BIGINT NOT NULL,
  project_version INTEGER NOT NULL,
  binding_version INTEGER,
  fact_digest TEXT NOT NULL,
  CONSTRAINT approved_action_recovery_authorization_assurance_check
    CHECK (assurance IN ('multi_factor', 'hardware', 'local_console')),
  CONSTRAINT approved_action_recovery_authorization_project_version_check
    CHECK (project_version BETWEEN 1 AND 2147483647),
  -- The local console has its authority from a built-in rule and so no binding; everybody else must have one.
  CONSTRAINT approved_action_recovery_authorization_binding_version_check CHECK (
    (binding_version IS NOT NULL AND binding_version BETWEEN 1 AND 2147483647)
    OR (binding_version IS NULL AND assurance = 'local_console' AND resolved_by_id = 'local-console')
  ),
  CONSTRAINT approved_action_recovery_authorization_recency_check CHECK (
    authenticated_at_ms <= authorized_at_ms AND authorized_at_ms <= authenticated_at_ms + 300000
  ),
  CONSTRAINT approved_action_recovery_authorization_digest_check
    CHECK (length(fact_digest) = 64 AND trim(fact_digest, '0123456789abcdef') = '')
);
CREATE UNIQUE INDEX approved_action_recovery_authorization_mutation_uidx
  ON approved_action_recovery_authorizations (mutation_id);
CREATE INDEX approved_action_recovery_authorization_project_idx
  ON approved_action_recovery_authorizations (project_id, authorized_at_ms, dispatch_id);
CREATE INDEX approved_action_recovery_authorization_auth_idx
  ON approved_action_recovery_authorizations (authentication_id, authorized_at_ms, dispatch_id);
-- ql3: append-only approved_action_recovery_authorizations
