"""The documents of this repository, and what the tests look for in them."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
USING, PROVING, REPORT = (ROOT / "docs" / f"{name}.md" for name in ("using", "proving", "report"))
DOCUMENTS = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced(path):
    """`[(language, first line, text)]` of the fenced blocks of a document."""
    text = path.read_text(encoding="utf-8")
    return [(m[1], text.count("\n", 0, m.start()) + 1, m[2]) for m in FENCE.finditer(text)]


def prose(text):
    """A document without its fenced blocks."""
    return FENCE.sub("", text)


def inline(text):
    """What stands in backticks outside fenced blocks, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def table(path, *header):
    """The rows of the one table with this header, `[[cell]]`."""
    text = path.read_text(encoding="utf-8")
    head = f"| {' | '.join(header)} |\n|{' --- |' * len(header)}\n"
    assert text.count(head) == 1, f"{path.name}: expected one table {head}"
    rows = text[text.index(head) + len(head) :].split("\n\n")[0].strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert all(len(row) == len(header) for row in cells), f"{path.name}: expected {len(header)} cells in each row"
    return cells


def names(cells):
    """What a column holds in backticks, each once."""
    found = Counter(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    assert max(found.values()) == 1, found
    return set(found)
