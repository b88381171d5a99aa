"""The performance gate: is a benchmark slower than its baseline?

`rule` decides, `store` keeps baselines in files, `run` gates one session, `against` compares two trees of this
repository, `words` says what was found, `hooks` is the pytest side.
"""
