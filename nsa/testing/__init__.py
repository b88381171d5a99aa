"""The suite that proves selection kernels, ours and others (docs/proving.md)."""

from nsa.testing.contestants.contract import contestant
from nsa.testing.contestants.selectors import selector

__all__ = ["contestant", "selector"]
