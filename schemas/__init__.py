"""The wire contract of ql3: messages, subjects, streams, error codes and canonical JSON."""
