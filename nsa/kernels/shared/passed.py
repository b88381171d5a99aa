"""With which Triton and for which architectures the current kernels have passed the compile matrix."""

from __future__ import annotations

import functools
from pathlib import Path

from nsa.kernels.shared import sources

LIST = Path(__file__).parents[2] / "configs" / "compiled.yaml"


def passed(triton: str, arch: str) -> bool:
    """Whether the kernels have passed with this minor version of Triton for this architecture."""
    return (".".join(triton.split(".")[:2]), arch) in passed_pairs()


@functools.cache
def passed_pairs() -> frozenset[tuple[str, str]]:
    """(Triton minor version, architecture) of the entries of `nsa/configs/compiled.yaml`; empty without that file.

    Only entries that were recorded with the current kernels count.

    Raises:
        ValueError: the file is wrong; the text names it.
    """
    if not LIST.is_file():
        return frozenset()
    import yaml

    try:
        entries = yaml.safe_load(LIST.read_text(encoding="utf-8"))["passed"] or []
        listed = [(entry["triton"], entry["arch"], entry["sources"]) for entry in entries]
        if not all(isinstance(word, str) for words in listed for word in words):
            raise TypeError("a value without quotes, as 3.10, which YAML reads as 3.1")
    except (yaml.YAMLError, KeyError, TypeError) as error:
        expected = "expected a list `passed` of mappings with triton, arch and sources"
        raise ValueError(f"{LIST}: {expected}, got {error!r}") from error
    ours = sources.kernel_sources()
    return frozenset((triton, arch) for triton, arch, kernels in listed if kernels == ours)
