"""One model of a table, and its writers for the screen, Markdown and CSV. HTML is written by `report.html.j2`."""

from __future__ import annotations

import csv
import string
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

WIDTH = 100  # columns of the screen
EMPTY = "-"  # what was not measured

Place = Literal["page", "screen"]


class Two(NamedTuple):
    """A cell of two figures, `22.95 (1.53×)`."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.first} ({self.second})"


@dataclass(frozen=True)
class Column:
    """A column: its name, and what it shows of a row. None means that nothing was measured.

    place: where the column is shown; None means everywhere.
    """

    name: str
    of: Callable[[Any], object]
    place: Place | None = None


@dataclass(frozen=True)
class Table:
    """Rows of anything that the columns can read, such as facts or groups of facts.

    Attributes:
        caption, legend, example: what is said of the table on the screen and on a page, see `legends.yaml`.
        folded: whether a reader of an HTML page unfolds the table.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    caption: str = ""
    legend: str = ""
    example: Sequence[str] = ()
    folded: bool = False

    def cells(self, place: Place = "page") -> list[dict[str, Any]]:
        """The cells of each row by column. Columns in which every cell is empty are left out."""
        shown = [column for column in self.columns if column.place in (None, place)]
        rows = [[column.of(row) for column in shown] for row in self.rows]
        kept = [i for i in range(len(shown)) if any(row[i] is not None for row in rows)]
        return [{shown[i].name: EMPTY if row[i] is None else row[i] for i in kept} for row in rows]

    def explained(self) -> str:
        """The example: the row of which most can be said, of several the first."""
        said = [[words.format_map(row) for words in self.example if _filled(words, row)] for row in self.cells()]
        most = max(said, key=len, default=[])
        return f"Example: {' '.join(most)}" if most else ""


def _filled(sentence: str, row: dict[str, Any]) -> bool:
    fields = [field.partition(".")[0] for _, field, _, _ in string.Formatter().parse(sentence) if field]
    return all(row.get(field, EMPTY) != EMPTY for field in fields)


def screen(table: Table) -> list[str]:
    """Lines of text: the caption, names of columns above each other, and the rows.

    A row's first cell stands alone on the line above if it does not fit.
    """
    rows = [{name: str(cell) for name, cell in row.items()} for row in table.cells("screen")]
    if not rows:
        return []
    first, *others = rows[0]
    widths = {name: max(len(part) for part in (*name.split(), *(row[name] for row in rows))) for name in others}
    room = max(len(first), WIDTH - sum(width + 2 for width in widths.values()))
    widths = {first: min(room, max(len(first), *(len(row[first]) for row in rows)))} | widths
    heads = [textwrap.wrap(name, width, break_on_hyphens=False) for name, width in widths.items()]
    deep = max(map(len, heads))
    text = [table.caption] if table.caption else []
    for cells in zip(*([""] * (deep - len(head)) + head for head in heads), strict=True):
        text.append(_line(cells, widths.values()))
    for row in rows:
        name = row[first]
        text += [name] if len(name) > room else []
        text.append(_line(["" if len(name) > room else name, *(row[name] for name in others)], widths.values()))
    return text


def _line(cells: Sequence[str], widths: Iterable[int]) -> str:
    name, *rest = widths
    return "  ".join(
        [f"{cells[0]:{name}}", *(f"{cell:>{width}}" for cell, width in zip(cells[1:], rest, strict=True))]
    ).rstrip()


def markdown(table: Table) -> str:
    """A Markdown table; empty without rows."""
    rows = table.cells()
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write_csv(table: Table, path: Path) -> None:
    """Write all columns, also empty ones."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(column.name for column in table.columns)
        writer.writerows([column.of(row) for column in table.columns] for row in table.rows)
