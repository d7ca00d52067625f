"""REST, web panel, SSE, sessions and credentials."""
