-- Requests that were closed long ago go as a whole, with what came of them; the audit ledger keeps who did what.
-- ql3: purgeable approved_action_plans by action_ref before created_at_ms
-- ql3: purgeable approval_decisions by request_id before decided_at_ms
-- ql3: purgeable approved_action_dispatches by approval_request_id before created_at_ms
-- ql3: purgeable approved_action_receipts by dispatch_id before created_at_ms
-- ql3: purgeable approved_action_recovery_resolutions by dispatch_id before resolved_at_ms
-- ql3: purgeable approved_action_recovery_authorizations by dispatch_id before authorized_at_ms
CREATE INDEX approval_request_age_idx ON approval_requests (expires_at_ms, id);
