"""Backward for small blocks: dQ of tiles of neighbouring tokens, dK and dV of windows of tokens, over their unions."""
