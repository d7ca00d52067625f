"""Schedule expressions: their grammar, their instants in a time zone, and their words. Pure: no I/O, no clock."""
