"""The performance gate: is a benchmark slower than its baseline?

A benchmark hands its samples to the fixture `publish` (`nsa.testing.benchmarks`). That asks the session's
`run.Gate.judge`, which asks `rule.judge`. If the verdict is a FAIL, `publish` fails the benchmark's test.

`store` keeps baselines in files, `against` compares two commits, and `words` has the texts of verdicts.
"""
