"""Key-major: a program holds a block of keys and all queries that selected it; partial results are merged."""
