"""Key-major: a program holds a block of keys and reads the queries that selected it. A second kernel merges results."""
