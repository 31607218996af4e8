"""What a plain chat request enters, and how the source hangs together.

    python -m personae.evals.trace

The whole server runs in this process, with the default model, without speculation. Plain streamed chats are
answered over ASGI after a warm-up, and the calls of Personae's Python functions are counted meanwhile, on all
threads. The calls of a decode step are the difference of a long and a short answer, for each token of it.

A circle of imports is a set of modules that all need each other, also if some of them only name a type.
"""

import ast
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import httpx
from networkx import DiGraph, strongly_connected_components
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette

import personae
from personae.api.app import create_app
from personae.api.local import open_engine
from personae.api.opened import serve_settings
from personae.api.options import ServeOptions

ROOT = f"{Path(personae.__file__).parent}/"
OFF = (
    "speculation/",
    "heads/",
    "background",
    "slot_quota",
    "prompt_logprobs",
    "pooling",
    "deferral",
    "penalties",
)
"""In the paths of features that a plain chat does not use."""
CORE = ("actors", "api", "engine", "grammar", "lora")
SHORT, LONG = 8, 72  # tokens


class CallCounter:
    """Counts calls by file, on this thread and on those that start after it, while it is `active`."""

    def __init__(self) -> None:
        self.active = False
        self.calls: Counter[str] = Counter()
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def take(self) -> Counter[str]:
        """What was counted since the last call."""
        taken, self.calls = self.calls, Counter()
        return taken

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if self.active and event == "call":
            name = frame.f_code.co_filename
            if name.startswith(ROOT) and name != __file__:
                self.calls[name.removeprefix(ROOT)] += 1


async def chat(app: Starlette, tokens: int) -> None:
    """One plain streamed chat of so many tokens."""
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "temperature": 0}
    limits = {"max_tokens": tokens, "ignore_eos": True, "repetition_penalty": 1}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post("/v1/chat/completions", json=body | limits)
        assert answer.text.rstrip().endswith("[DONE]"), answer.text


async def measure(counter: CallCounter) -> tuple[Counter[str], Counter[str]]:
    """The calls of a short answer, and of each further token of a long one."""
    options = ServeOptions(one_process=True, speculate="off")
    async with open_engine(options) as opened:
        app = create_app(opened.client, serve_settings(options, opened))
        for tokens in (LONG, SHORT):
            await chat(app, tokens)
        found = []
        for tokens in (SHORT, LONG):
            counter.active = True
            await chat(app, tokens)
            counter.active = False
            found.append(counter.take())
    short, long = found
    return short, Counter({file: (long[file] - short[file]) / (LONG - SHORT) for file in long})


def modules(packages: tuple[str, ...]) -> dict[str, ast.Module]:
    """The modules of these packages, by their dotted names."""
    found = {}
    for package in packages:
        for path in sorted((Path(ROOT) / package).rglob("*.py")):
            name = ".".join(("personae", *path.relative_to(ROOT).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imported(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    """The `known` modules that a module imports, at any place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            parts = [f"{node.module}.{each.name}" for each in node.names]
            yield from (part if part in known else node.module for part in parts)


def circles() -> list[list[str]]:
    """The circles of imports, the largest first."""
    known = modules((*CORE, "kernels"))
    edges = ((name, other) for name, tree in known.items() for other in imported(tree, known))
    parts = strongly_connected_components(DiGraph(edges))
    return sorted((sorted(part) for part in parts if len(part) > 1), key=lambda part: (-len(part), part))


def matcher_tests() -> int:
    """How often a module outside `grammar` asks whether an object is one of its kinds of matchers."""
    trees = modules(("grammar",)).values()
    classes = (node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    kinds = {name for name in classes if name.endswith("Matcher") and name != "Matcher"}
    calls = (
        node
        for tree in modules(tuple(each for each in CORE if each != "grammar")).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    )
    return sum(
        any(isinstance(part, ast.Name) and part.id in kinds for part in ast.walk(call.args[1]))
        for call in calls
    )


def count_lines(package: str) -> int:
    """The lines of a package."""
    return sum(len(path.read_text().splitlines()) for path in (Path(ROOT) / package).rglob("*.py"))


def main() -> None:
    """Print the tables."""
    counter = CallCounter()
    request, step = anyio.run(measure, counter)
    sys.setprofile(None)
    threading.setprofile(None)
    lines = {file: len((Path(ROOT) / file).read_text().splitlines()) for file in request}
    off = sorted(file for file in lines if any(part in file for part in OFF))
    found = circles()
    table = Table("a plain chat request", "count")
    table.add_row("files entered", str(len(lines)))
    table.add_row("lines in them", f"{sum(lines.values()):,}")
    table.add_row("files of features that are off", str(len(off)))
    table.add_row("Python calls of a decode step of one row", f"{sum(step.values()):.0f}")
    table.add_row("of them for features that are off", f"{sum(step[file] for file in off):.0f}")
    table.add_section()
    table.add_row("tests for a kind of matcher outside grammar", str(matcher_tests()))
    table.add_row("circles of imports", str(len(found)))
    table.add_row("files in the largest", str(max(map(len, found), default=0)))
    table.add_section()
    for package in CORE:
        table.add_row(f"lines of {package}", f"{count_lines(package):,}")
    table.add_row("lines of these", f"{sum(map(count_lines, CORE)):,}")
    console = Console()
    console.print(table)
    for title, names in (("files of features that are off", off), *(("a circle", each) for each in found)):
        console.print(f"{title}: {', '.join(names) or 'none'}")
    busiest = Table("file", "calls a step")
    for file, calls in step.most_common(25):
        busiest.add_row(file, f"{calls:.1f}")
    console.print(busiest)


if __name__ == "__main__":
    main()
