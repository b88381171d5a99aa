"""Query-major: a program holds the query heads of one row and walks the keys that the row selected."""
