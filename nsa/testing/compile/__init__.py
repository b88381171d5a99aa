"""The compile matrix: every kernel must compile for GPUs that are not here, within its registers and shared memory."""
