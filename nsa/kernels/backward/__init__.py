"""Gradients: the selection is turned round, so that dK and dV are summed block by block."""
