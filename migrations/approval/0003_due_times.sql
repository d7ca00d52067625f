-- When what a request is about is due; what is approved earlier is handed over then.
ALTER TABLE approval_requests ADD COLUMN not_before_ms BIGINT CHECK (not_before_ms >= 0);
