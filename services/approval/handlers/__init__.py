"""What can be approved: one module an action, each with its plan, preview, inspection, execution and evidence."""
