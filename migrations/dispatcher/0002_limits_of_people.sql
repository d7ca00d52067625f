-- What somebody set apart from the tasks. It stands before what the tasks' terms say until it is taken away.
ALTER TABLE concurrency_limits ADD COLUMN set_live BIGINT CHECK (set_live IS NULL OR set_live >= 1);
