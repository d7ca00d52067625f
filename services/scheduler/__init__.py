"""Tasks, revisions, triggers, schedules and admissions."""
