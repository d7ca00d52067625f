"""The only files of the dispatcher that know SQL: one statement, one name."""
