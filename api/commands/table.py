"""Tables and JSON for commands that list something."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import typer


def show(rows: Sequence[Sequence[object]], names: Sequence[str]) -> None:
    """Print a table with aligned columns. None and false are left empty."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = [[name.upper() for name in names], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_json(values: object) -> None:
    """Print structs as JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())


def date(time: int | None) -> str:
    """A Unix time in UTC, to the minute."""
    return "" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _cell(value: object) -> str:
    return "" if value is None or value is False else str(value)
