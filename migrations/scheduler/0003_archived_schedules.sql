-- A project that comes back wakes its own schedules, whatever the number of all.
CREATE INDEX schedules_archived ON schedules (project) WHERE stopped_by = 'project_archived';
