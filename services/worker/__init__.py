"""Offers, the process host, logs and completion receipts."""
