"""The suite that proves selection kernels, ours and others (docs/proving.md)."""

from nsa.testing.contestants.contract import contestant

__all__ = ["contestant"]
