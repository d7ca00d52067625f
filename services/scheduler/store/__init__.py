"""The scheduler's tables: the only files of this service that know SQL."""
