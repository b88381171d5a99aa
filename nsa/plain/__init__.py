"""Selection attention in plain PyTorch: the spans that a row reads, the fp64 oracle, and packed SDPA, the fallback."""
