"""What several kernel families need: helpers in Triton, merging, launching, and hashes of the kernels' sources."""
