"""How evenly groups of ranks compute experts on routing traces, with and without moving experts.

    python -m personae.evals.expert_balance

A trace has windows of steps. Each layer's experts have favourites, whose popularity drifts from window to
window. Before each window experts are placed by the loads of the window before. The figures are the load of
the busiest group by the mean, in the mean over layers and windows, and in the worst of them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from personae.engine.parallel.expert_placement import (
    ExpertGroups,
    Placement,
    balanced,
    first_placement,
    imbalance,
    moves,
)

SIZES = (  # experts, chosen ones, groups, spare slots of each
    (64, 6, 4, 0),
    (64, 6, 4, 1),
    (128, 8, 8, 0),
    (128, 8, 8, 1),
    (256, 8, 8, 1),
    (256, 8, 32, 1),
    (256, 8, 32, 2),
)
SKEWS = (0.5, 1.0)  # exponents of Zipf's law
LAYERS, WINDOWS, ROWS = 4, 6, 100_000
DRIFT = 0.03  # the deviation of the logarithm of an expert's popularity, from window to window


def trace(
    experts: int, chosen: int, skew: float, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """The loads of a layer's experts in each window. A token has `chosen` different ones, so none has more
    than one row of so many."""
    popularity = rng.permutation((np.arange(experts) + 1.0) ** -skew)
    while True:
        shares = np.minimum(popularity / popularity.sum(), 1 / chosen)
        yield rng.multinomial(ROWS, shares / shares.sum())
        popularity = popularity * np.exp(rng.normal(0, DRIFT, experts))


def played(
    experts: int, chosen: int, groups: ExpertGroups, skew: float, rng: np.random.Generator
) -> tuple[list[float], list[float], int]:
    """The imbalance of each window where experts stay and where they move, and how many moved."""
    staying, moving, moved = [], [], 0
    first = first_placement(experts, groups)
    for _ in range(LAYERS):
        placement: Placement = first
        for window, counts in zip(range(WINDOWS), trace(experts, chosen, skew, rng), strict=False):
            loads = counts.tolist()
            if window:  # the first one only counts
                staying.append(imbalance(loads, first))
                moving.append(imbalance(loads, placement))
            better = balanced(loads, placement)
            moved += moves(placement, better)
            placement = better
    return staying, moving, moved


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="personae.evals.expert_balance")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    rng = np.random.default_rng(asked.seed)
    print("| experts | groups | spare | skew | stay | move | worst | moved |")
    print("|---|---|---|---|---|---|---|---|")
    for experts, chosen, count, spare in SIZES:
        for skew in SKEWS:
            staying, moving, moved = played(experts, chosen, ExpertGroups(count, spare), skew, rng)
            print(
                f"| {experts}, {chosen} of them | {count} | {spare} | {skew} | {np.mean(staying):.2f} "
                f"| {np.mean(moving):.2f} | {max(moving):.2f} | {moved / LAYERS / WINDOWS:.0f} |"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
