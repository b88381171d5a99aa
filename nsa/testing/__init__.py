"""The suite that proves selection kernels, for kernels of ours and of others (docs/proving.md)."""

from nsa.testing.contestants.contract import contestant

__all__ = ["contestant"]
