"""What the compile matrix has passed: with which Triton, for which architecture, these very kernels."""

from __future__ import annotations

import functools
from pathlib import Path

from nsa.kernels.shared import sources

LIST = Path(__file__).parents[2] / "configs" / "compiled.yaml"


def passed(triton: str, arch: str) -> bool:
    """Whether the compile matrix has passed this Triton (any patch level of it) for this architecture."""
    return (".".join(triton.split(".")[:2]), arch) in passed_pairs()


@functools.cache
def passed_pairs() -> frozenset[tuple[str, str]]:
    """(Triton minor version, architecture), as `nsa/configs/compiled.yaml` lists them; none where there is no file.

    An entry counts only if it was recorded with the kernels at hand. Raises ValueError naming the file if it is not as
    expected.
    """
    if not LIST.is_file():
        return frozenset()
    import yaml

    try:
        entries = yaml.safe_load(LIST.read_text(encoding="utf-8"))["passed"] or []
        listed = [(entry["triton"], entry["arch"], entry["sources"]) for entry in entries]
        if not all(isinstance(word, str) for words in listed for word in words):
            raise TypeError("3.10 without quotes is 3.1")
    except (yaml.YAMLError, KeyError, TypeError) as error:
        expected = "expected a list `passed` of mappings with triton, arch and sources"
        raise ValueError(f"{LIST}: {expected}, got {error!r}") from error
    ours = sources.kernel_sources()
    return frozenset((triton, arch) for triton, arch, kernels in listed if kernels == ours)
