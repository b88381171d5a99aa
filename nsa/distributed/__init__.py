"""Selection attention over a sequence that is sharded among ranks (context parallel), on `torch.distributed`."""

from nsa.distributed.attention import selection_attention

__all__ = ["selection_attention"]
