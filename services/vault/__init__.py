"""Secret envelopes."""
