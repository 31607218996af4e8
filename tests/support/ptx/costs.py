"""What the kernels execute and move, counted: instructions of the longest warp, bytes by access and width.

`costs.json` has the figures of one Triton. A test compares them with what is counted now, and
`python -m personae.evals.kernels --costs` writes them anew.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from ptx.cases_sampling import sampling
from ptx.contract import CONTRACT, Maker
from ptx.launches import Interpreted, Run

FILE = Path(__file__).with_name("costs.json")
TOLERANCE = 0.02  # of a figure: it may grow by so much unnoticed
WHOLE = {
    "temperature": 1,
    "top_k 20, top_p 0.8": 3,
    "top_p 0.95": 4,
    "top_k 40 far down": 6,
}
"""One row of 151,936 ids, by what it asks for."""
CASES: dict[str, list[Maker]] = {
    **CONTRACT,
    **{
        f"{name}, 151,936 ids": [lambda _, voice=voice: sampling(3, vocabulary=151_936, voices=(voice,))]
        for name, voice in WHOLE.items()
    },
}
Costs = dict[str, dict[str, Any]]
"""By kernel: "instructions", and "bytes" by access, as "load 16"."""


def run(name: str, capability: int) -> list[Run]:
    """All launches of a name's cases, which have to pass."""
    runs: list[Run] = []
    for make in CASES[name]:
        case = make(capability)
        with Interpreted(capability) as gpu:
            wrong = [check.error() for check in case.run() if check.failed()]
        assert not wrong, case.text
        runs += gpu.runs
    return runs


def costs(runs: list[Run]) -> Costs:
    """By kernel: the instructions of the longest launch, the bytes of all."""
    found: Costs = {}
    for each in runs:
        cost = found.setdefault(each.kernel, {"instructions": 0, "bytes": Counter()})
        cost["instructions"] = max(cost["instructions"], each.counts.instructions)
        cost["bytes"].update(each.counts.bytes)
    return {kernel: {**cost, "bytes": dict(sorted(cost["bytes"].items()))} for kernel, cost in found.items()}


def grown(name: str, capability: int, now: Costs, before: Costs) -> Iterator[str]:
    """A sentence for every figure that is larger than the table's by more than the tolerance."""
    for kernel, cost in now.items():
        known = before.get(kernel, {"instructions": 0, "bytes": {}})
        figures = {"instructions": (cost["instructions"], known["instructions"])}
        for access in cost["bytes"].keys() | known["bytes"].keys():
            figures[f"bytes ({access})"] = cost["bytes"].get(access, 0), known["bytes"].get(access, 0)
        for what, (new, old) in figures.items():
            if new > old * (1 + TOLERANCE):
                yield f"{name}, sm_{capability}, {kernel}: {new:,} {what}, before {old:,}"


def read() -> dict[str, Any]:
    """The table: "triton", its version, and by "sm_80" and "sm_90" the costs by name."""
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def write() -> None:
    """Count everything anew."""
    table = {
        f"sm_{capability}": {name: costs(run(name, capability)) for name in CASES} for capability in (80, 90)
    }
    text = json.dumps({"triton": triton.__version__, **table}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
