"""The services of ql3, one package each."""
