"""Tokens per second through HTTP: concurrency 1, 8, 32 with 0, 1 and 16 adapters in the mix, and JSON-bound.

    python -m personae.evals.bench.serve --model models/smol135 --adapters models/lora --repeat 3

Starts `personae serve` on the model, loads it, prints a table (median of the repeats) and, with --out, writes
JSON. Prompts are random token ids, each its own, so that no prefix cache helps; answers run to their full
length (`ignore_eos`), greedy.
"""

import asyncio
import json
import random
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from personae.evals.bench.load import Cell, closed_loop
from personae.evals.served import Served

WIDTHS = (1, 8, 32)
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "status": {"enum": ["open", "paid", "sent"]},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "status", "lines"],
    "additionalProperties": False,
}


def bodies(
    mode: str, count: int, models: list[str], prompt: int, output: int, seed: int
) -> list[dict[str, Any]]:
    """`count` requests. mode: base, one (the first adapter), mixed (all adapters in turn), json."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": models[0],
            "prompt": [rng.randrange(1000, 40000) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        if mode == "one":
            body["model"] = models[1]
        elif mode == "mixed":
            body["model"] = models[1 + number % (len(models) - 1)]
        elif mode == "json":
            del body["ignore_eos"]
            body |= {"temperature": 1, "seed": number}
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "order", "schema": ORDER, "strict": True},
            }
        made.append(body)
    return made


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    adapters: Annotated[Path | None, typer.Option(help="A folder of adapter folders.")] = None,
    prompt: int = 128,
    output: int = 128,
    repeat: int = 3,
    concurrency: Annotated[list[int] | None, typer.Option()] = None,
    rounds: Annotated[int, typer.Option(help="Requests that each of the concurrent clients sends.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the cells here, as JSON.")] = None,
) -> None:
    """Measure every cell `repeat` times, in rounds, and print the medians."""
    names = sorted(path.name for path in adapters.iterdir() if path.is_dir()) if adapters else []
    models = [model.name, *names]
    modes = ["base", *(["one", "mixed"] if names else []), "json"]
    cells: dict[tuple[str, int], list[Cell]] = {}
    arguments = [str(model), *(["--adapters", str(adapters)] if adapters else [])]
    plan = [(mode, width) for _ in range(repeat) for mode in modes for width in concurrency or WIDTHS]
    with Served(arguments) as server:
        for name in models:  # every adapter on the device, every thread awake
            asyncio.run(closed_loop(server.url, bodies("base", 1, [name], 8, 4, 0), 1))
        for number, (mode, width) in enumerate(track(plan, "load", console=Console(stderr=True))):
            made = bodies(mode, rounds * width, models, prompt, output, number)
            cell = asyncio.run(closed_loop(server.url, made, width))
            cells.setdefault((mode, width), []).append(cell)
    table = Table(
        "load",
        "concurrency",
        "tokens/s",
        "spread",
        "first token p50 ms",
        "gap p50 ms",
        "gap p99 ms",
        "errors",
    )
    for (mode, width), runs in cells.items():
        rates = sorted(run.tokens_per_second for run in runs)
        table.add_row(
            mode,
            str(width),
            f"{statistics.median(rates):.0f}",
            f"{rates[0]:.0f}-{rates[-1]:.0f}",
            *(
                f"{1000 * statistics.median(getattr(run, name) for run in runs):.1f}"
                for name in ("first_p50", "gap_p50", "gap_p99")
            ),
            str(sum(run.errors for run in runs)),
        )
    Console().print(table)
    if out is not None:
        out.write_text(
            json.dumps(
                {f"{mode}:{width}": [asdict(run) for run in runs] for (mode, width), runs in cells.items()}
            )
        )


if __name__ == "__main__":
    typer.run(main)
