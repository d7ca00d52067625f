-- The command of the container engine that the attempt was given to: a container outlives a process host that dies.
ALTER TABLE execution_offers ADD COLUMN engine TEXT;
