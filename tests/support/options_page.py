"""Writes the tables of docs/operate/options.md from the classes of options.

python tests/support/options_page.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from personae.actors.options import OptionInfo
from personae.api.options import GROUPS, Option, ServeOptions, options_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "options.md"
_BEGIN, _END = "<!-- begin: made by `make docs` -->", "<!-- end -->"


def tables() -> str:
    """All options, with one table per group."""
    grouped = {each.name for group in GROUPS for each in options_of(group)}
    rest = [each for each in options_of(ServeOptions) if each.name not in grouped]
    parts = [_table("Argument", rest)]
    parts += [_table((group.__doc__ or "").rstrip("."), list(options_of(group))) for group in GROUPS]
    return "\n\n".join(parts)


def written() -> str:
    """The tables as the page has them now."""
    return _between(PAGE.read_text(encoding="utf-8"))[1]


def _table(title: str, options: list[Option]) -> str:
    rows = [f"## {title}", "", "| option | value | default | meaning |", "|---|---|---|---|"]
    for each in options:
        name = f"`{each.text}`" if each.name != "model" else "`MODEL`"
        rows.append(f"| {name} | {_value(each)} | {_default(each)} | {each.info.help} |")
    return "\n".join(rows)


def _value(each: Option) -> str:
    return ", ".join(_values(each)) + (_bounds(each.info) if each.info.parse is None else "")


def _values(each: Option) -> Iterator[str]:
    if each.info.metavar:
        yield f"`{each.info.metavar}`".replace("|", "\\|")
        return
    for kind in (each.type, *get_args(each.type)):
        if get_origin(kind) is Literal:
            yield from (f"`{one}`" for one in get_args(kind))
            return
    kinds = {int: "integer", float: "seconds", bool: "flag", str: "text", Path: "path"}
    yield next(said for kind, said in kinds.items() if kind in (each.type, *get_args(each.type)))


def _bounds(info: OptionInfo) -> str:
    if info.min is None:
        return ""
    return f", at least {info.min}" if info.max is None else f", {info.min} to {info.max}"


def _default(each: Option) -> str:
    if each.info.unset is not None:
        return str(each.info.unset)
    if each.default in (None, (), "", False):
        return ""
    return "on" if each.default is True else f"`{each.default}`"


def _between(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(_BEGIN)
    inside, _, after = rest.partition(_END)
    return before, inside.strip(), after


def main() -> None:
    """Write the page."""
    before, _, after = _between(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{_BEGIN}\n\n{tables()}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
