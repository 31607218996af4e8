"""The data on which the base model is trained, and the tasks on which it is measured.

Everything is a pure function of (split, seed): `samples` gives the same conversations wherever it runs.
"""

from collections.abc import Callable, Iterator
from random import Random

from personae.evals.demo.sample import Sample
from personae.evals.demo.tasks import calendar, chat, drills, extract, invoices, results, tools, triage, verse
from personae.evals.demo.values import Split, Values

Task = Callable[[Values], Sample]

TASKS: dict[str, Task] = {
    "tool": tools.single,
    "parallel": tools.parallel,
    "no_call": tools.no_call,
    "result": results.answer_from_result,
    "extract": extract.extraction,
    "chat": chat.talk,
}
DRILLS: dict[str, Task] = {"repeat": drills.repeat, "lookup": drills.lookup, "dates": drills.dates}
ADAPTER_TASKS: dict[str, Task] = {
    "triage": triage.triage,
    "calendar": calendar.calendar,
    "invoices": invoices.invoices,
    "verse": verse.verse,
}
WEIGHTS = {"tool": 34, "parallel": 12, "no_call": 13, "result": 8, "extract": 20, "chat": 7}
DRILL_WEIGHTS = {"repeat": 4, "lookup": 5, "dates": 6}


def samples(task: Task, split: Split, seed: str) -> Iterator[Sample]:
    """An endless stream of one task's samples."""
    values = Values(Random(f"{split} {seed}"), split)
    while True:
        yield task(values)


def mixture(seed: str, drilling: float) -> Iterator[Sample]:
    """An endless training stream; `drilling` in [0, 1] is the curriculum: 1 means drills only."""
    rng = Random(f"mixture {seed}")
    values = Values(rng, "train")
    weights = {name: weight * (1 - drilling) for name, weight in WEIGHTS.items()}
    weights |= {name: weight * (1 + 4 * drilling) for name, weight in DRILL_WEIGHTS.items()}
    tasks = TASKS | DRILLS
    names, shares = list(weights), list(weights.values())
    while True:
        yield tasks[rng.choices(names, shares)[0]](values)
