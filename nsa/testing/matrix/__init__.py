"""What is tested: shapes (`case`), their tensors (`inputs`, `problem`, `caches`), and calls that Hypothesis draws."""
