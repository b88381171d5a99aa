"""What kernels of several families need: helpers in Triton, merging, launching, and what is known of sources."""
