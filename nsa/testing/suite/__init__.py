"""The tests by which a contestant is judged, ours included: `pytest --pyargs nsa.testing.suite`."""
