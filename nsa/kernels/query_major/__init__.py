"""Query-major: a program holds the query heads of one row and reads the keys that the row selected."""
