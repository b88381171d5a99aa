"""The inputs of tests: shapes (`case`), their tensors (`inputs`, `problem`, `caches`), and Hypothesis `strategies`."""
