"""What the scheduler costs the host: microseconds of plan() and commit(), with a device that takes no time.

    python -m personae.evals.bench.scheduler [--steps 2000]

It measures decode steps (one token per row, two plans in flight, 8 adapters, virtual token counters, a
sixteenth of the rows at the end of a page), then the admission of one prompt, cold and with its whole prefix
in the cache.
"""

import argparse
import gc
from collections import deque
from statistics import quantiles
from time import perf_counter_ns

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog

LOOKAHEAD = 2


def log(id: str, prompt: range, max_tokens: int, adapter: int) -> SequenceLog:
    """A sequence that ends only by its length."""
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return SequenceLog(id, tuple(prompt), len(prompt), params, adapter=f"adapter-{adapter}")


def answer(plan: StepPlan) -> StepResult:
    """The result of a device that samples token 7 everywhere."""
    return StepResult(plan.step, tuple((7,) if row.samples else () for row in plan.rows))


def decode(rows: int, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds of each plan() and each commit() of `steps` pure decode steps of `rows` rows."""
    layout = MemoryLayout(rows * (steps // 16 + 8), 16, rows, steps + 100, 8192)
    scheduler = Scheduler(layout, VirtualTokenCounters(), background_policy=VirtualTokenCounters())
    for i in range(rows):
        scheduler.add(log(str(i), range(i, i + 16 + i % 16), steps + 50, i % 8))
    plans, commits = list[float](), list[float]()
    flying: deque[StepPlan] = deque()
    while len(commits) < steps:
        while len(flying) < LOOKAHEAD:
            begun = perf_counter_ns()
            plan = scheduler.plan()
            plans.append((perf_counter_ns() - begun) / 1e3)
            assert plan is not None
            flying.append(plan)
        result = answer(flying.popleft())
        begun = perf_counter_ns()
        scheduler.commit(result)
        commits.append((perf_counter_ns() - begun) / 1e3)
    return plans[10:], commits[10:]


def admit(tokens: int, repeats: int, *, cached: bool) -> list[float]:
    """Microseconds of each plan() that admits one prompt of `tokens` tokens."""
    layout = MemoryLayout(tokens, 16, 4, tokens + 100, tokens)
    scheduler = Scheduler(layout, VirtualTokenCounters(), background_policy=VirtualTokenCounters())
    spent = []
    for i in range(repeats):
        first = 0 if cached else i * tokens
        scheduler.add(log(str(i), range(first, first + tokens), 1, 0))
        begun = perf_counter_ns()
        plan = scheduler.plan()
        spent.append((perf_counter_ns() - begun) / 1e3)
        assert plan is not None
        scheduler.commit(answer(plan))
    return spent[2:]


def line(name: str, spent: list[float]) -> str:
    """One row of the table."""
    cuts = quantiles(spent, n=100)
    return f"{name:<36}{cuts[49]:>9.1f}{cuts[94]:>9.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    gc.freeze()
    print(f"{'microseconds':<36}{'p50':>9}{'p95':>9}")
    for rows in (8, 64, 256):
        plans, commits = decode(rows, steps)
        print(line(f"{rows} decoding rows: plan", plans))
        print(line(f"{rows} decoding rows: commit", commits))
        print(line(f"{rows} decoding rows: both", [a + b for a, b in zip(plans, commits, strict=False)]))
    for cached in (False, True):
        name = f"admit 2048 tokens, {'cached' if cached else 'cold'}: plan"
        print(line(name, admit(2048, 200, cached=cached)))


if __name__ == "__main__":
    main()
