"""Tables that benchmarks return, for readers and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """Results of a benchmark: a title, named columns, rows, and notes that explain the numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Format the table as aligned text for a terminal. The first column is aligned left, the others right."""
        rows = [self.columns, *(tuple(_shown(cell) for cell in row) for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        lines = [self.title, *(_line(row, widths) for row in rows), *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)

    def json(self) -> dict[str, object]:
        """Return the table as a dictionary for JSON, with one dictionary per row, keyed by column names."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  " + "  ".join([row[0].ljust(widths[0]), *rest])


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 1 else f"{cell:,.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
