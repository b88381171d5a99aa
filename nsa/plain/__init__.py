"""A call in plain PyTorch: which keys its rows read, the fp64 oracle, and packed SDPA, the fallback."""
