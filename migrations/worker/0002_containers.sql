-- The command of the container engine that the attempt was given to, empty for none: a container outlives a process
-- host that dies. Null in rows from before, of which nothing is known.
ALTER TABLE execution_offers ADD COLUMN engine TEXT;
