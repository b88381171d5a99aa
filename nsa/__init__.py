"""NSA selection attention: kernels, their reference and routing. `import nsa` does not import Triton."""

from nsa.api import selection_attention, selection_attention_with_kvcache
from nsa.dispatch import RouteRecord, routes
from nsa.legacy import (
    grouped_selection_attention_packed,
    sel_attn_fwd_dense,
    sel_attn_fwd_dense_group,
    sel_attn_fwd_varlen,
    sel_attn_fwd_varlen_group,
    selection_attention_triton,
)
from nsa.plain.spans import PackedRows, merge_ranges, pack_rows, ranges_from_blocks
from nsa.selecting.api import select_blocks
from nsa.selecting.compress import compress
from nsa.settings import Settings, configure

__version__ = "0.1.0"

__all__ = [
    "PackedRows", "RouteRecord", "Settings", "compress", "configure", "grouped_selection_attention_packed",
    "merge_ranges", "pack_rows", "ranges_from_blocks", "routes", "sel_attn_fwd_dense", "sel_attn_fwd_dense_group",
    "sel_attn_fwd_varlen", "sel_attn_fwd_varlen_group", "select_blocks", "selection_attention",
    "selection_attention_triton", "selection_attention_with_kvcache",
]  # fmt: skip
