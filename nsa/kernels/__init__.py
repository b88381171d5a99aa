"""Triton kernels and their launchers. Importing this package does not import Triton; its modules do."""

from collections import Counter

launches: Counter[str] = Counter()
"""Kernel launches of this process by route name, counted at the launch. ``split`` counts launches that divided each row
among several programs. ``steps`` counts launches of query-major for the steps of a ragged batch of another schedule."""
