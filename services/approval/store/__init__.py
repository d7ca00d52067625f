"""The only modules that know the tables of authority. One statement, one name."""
