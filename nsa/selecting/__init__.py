"""Selecting: which blocks of keys each query reads (docs/selecting.md). Imports no Triton."""
