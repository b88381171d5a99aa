"""Union: neighbouring queries read the blocks that any of them selected, each block once."""
