"""The examples on the documentation's pages: found, run, and separated from their output.

A `python` block is executed; its output is what it prints. The output of a `sh` block that begins with curl
or personae bench is JSON. A `text` or `json` block right after it is the expected output. Blocks of other
languages and other commands are not run. The blocks of a page share their names.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"
REAL = ("README.md", "docs/guide/examples.md", "docs/guide/tools.md")
"""Their examples are for what `personae serve` serves."""
DEMO = (
    "docs/guide/batches.md",
    "docs/guide/bench.md",
    "docs/guide/console.md",
    "docs/guide/embeddings.md",
    "docs/guide/structured_output.md",
    "docs/operate/administration.md",
)
"""Theirs are for the small model, whose answers are the same on every machine."""
THINKS = "enable_thinking"
"""Stands in blocks for models that reason, which these do not."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = ("curl ", "personae bench ")
_VARY = {"id", "created", "call_id", "system_fingerprint"}
_WIDTH = 130


class Example(NamedTuple):
    """`shown` is its expected output, if the page has one; `place` is where that output is."""

    page: str
    line: int
    language: str
    source: str
    shown: str | None
    place: tuple[int, int]


def examples(page: str) -> Iterator[Example]:
    """The examples of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    for block, after in zip_longest(blocks, blocks[1:]):
        language, source = block.groups()
        if language != "python" and not (language == "sh" and source.startswith(_COMMANDS)):
            continue
        if THINKS in source:
            continue
        shown, place = None, (0, 0)
        if (
            after is not None
            and after[1] in ("text", "json")
            and not text[block.end() : after.start()].strip()
        ):
            shown, place = after[2], after.span(2)
        yield Example(page, text.count("\n", 0, block.start()) + 1, language, source, shown, place)


def run(example: Example, url: str, names: dict[str, Any]) -> str:
    """Run an example and return its output. `names` are what a page's earlier blocks have defined."""
    source = example.source.replace(ADDRESS, url)
    if example.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{example.page}:{example.line}", "exec"), names)
        return printed.getvalue()
    assert shutil.which("curl"), "the examples use curl"
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the folder of `personae`
    done = subprocess.run(
        ["bash", "-c", source],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=os.environ | {"PATH": search},
    )
    if source.startswith("curl "):
        assert not json.loads(done.stdout).get("error"), f"{example.page}:{example.line} brings {done.stdout}"
    return done.stdout


def same(example: Example, brought: str) -> bool:
    """Whether an output is the one on the page, except for ids and times."""
    if example.shown is None or example.language == "python":
        return example.shown in (None, brought)
    return bool(_steady(json.loads(brought)) == _steady(json.loads(example.shown)))


def written(example: Example, brought: str) -> str:
    """An example's output as a page shows it."""
    return brought if example.language == "python" else _folded(json.loads(brought)) + "\n"


def _steady(value: Any) -> Any:
    """The JSON without the parts that differ between answers."""
    if isinstance(value, dict):
        return {name: _steady(entry) for name, entry in value.items() if name not in _VARY}
    return [_steady(entry) for entry in value] if isinstance(value, list) else value


def _folded(value: Any, indent: int = 0) -> str:
    """JSON with as much on a line as fits."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) + indent <= _WIDTH or not isinstance(value, dict | list) or not value:
        return whole
    parts = (
        [f"{json.dumps(name)}: {_folded(entry, indent + 1)}" for name, entry in value.items()]
        if isinstance(value, dict)
        else [_folded(entry, indent + 1) for entry in value]
    )
    lines = [parts[0]]
    for part in parts[1:]:
        last = lines[-1].rpartition("\n")[2]
        if "\n" in part or "\n" in lines[-1] or indent + len(last) + len(part) + 3 > _WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + (",\n" + " " * (indent + 1)).join(lines) + ends[1]
