"""What a plain chat request enters: files, their lines, and the Python calls of a decode step.

    python -m personae.evals.trace

The whole server runs in this process, with the default model, without speculation. Plain streamed chats are
answered over ASGI after a warm-up, and the calls of Personae's Python functions are counted meanwhile, on all
threads. The calls of a decode step are the difference of a long and a short answer, for each token of it.
"""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import httpx
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette

import personae
from personae.api.app import create_app
from personae.api.local import open_engine
from personae.api.options import ServeOptions
from personae.api.settings import serve_settings

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
            if name.startswith(ROOT):
                self.calls[name.removeprefix(ROOT)] += 1


async def chat(app: Starlette, tokens: int) -> None:
    """One plain streamed chat of so many tokens."""
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "temperature": 0}
    limits = {"max_tokens": tokens, "ignore_eos": True}
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


def main() -> None:
    """Print the table."""
    counter = CallCounter()
    request, step = anyio.run(measure, counter)
    sys.setprofile(None)
    threading.setprofile(None)
    lines = {file: len((Path(ROOT) / file).read_text().splitlines()) for file in request}
    table = Table("a plain chat request", "count")
    table.add_row("files entered", str(len(lines)))
    table.add_row("lines in them", f"{sum(lines.values()):,}")
    table.add_row("of features that are off", str(sum(any(part in file for part in OFF) for file in lines)))
    table.add_row("Python calls of a decode step of one row", f"{sum(step.values()):.0f}")
    console = Console()
    console.print(table)
    busiest = Table("file", "calls a step")
    for file, calls in step.most_common(25):
        busiest.add_row(file, f"{calls:.1f}")
    console.print(busiest)


if __name__ == "__main__":
    main()
