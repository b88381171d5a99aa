"""Implementations that are tested or timed: our kernels, kernels of others, SDPA, and dense attention."""
