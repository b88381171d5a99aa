"""The tests that judge a contestant, ours included: `pytest --pyargs nsa.testing.suite`."""
