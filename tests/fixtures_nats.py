"""Real NATS servers for tests."""
