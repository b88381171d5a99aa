"""The performance gate: is a benchmark slower than its baseline?

`rule` decides, `store` keeps baselines in files, `run` gates one session, `against` compares two commits, `words` has
the texts of verdicts, and `hooks` connects the gate to pytest.
"""
