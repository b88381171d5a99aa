"""Triton kernels and their launchers. Importing this package imports no Triton; its modules do."""

from collections import Counter

launches: Counter[str] = Counter()
"""Kernel launches of this process by route name, counted where the launch happens; ``split`` counts those that shared
each row among programs."""
