"""What can be tested or timed beside it: kernels of ours, of others by name, SDPA, and dense attention."""
