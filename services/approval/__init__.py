"""Authority: identities, projects, roles, approvals and approved actions."""
