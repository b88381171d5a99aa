"""Gradients. The selection is inverted, to know which queries selected a block and to sum dK and dV block by block."""
