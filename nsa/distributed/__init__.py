"""Selection attention over a sequence that is sharded among ranks (context parallel), on `torch.distributed`."""

from nsa.distributed.attention import selection_attention
from nsa.distributed.shards import Layout

__all__ = ["Layout", "selection_attention"]
