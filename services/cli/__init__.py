"""The ql3 command and the composition root."""
