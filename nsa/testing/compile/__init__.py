"""The compile matrix: does every kernel compile for GPUs that are not here, within its registers and shared memory?"""
