"""Deferred rows: rows that skip a step because they cannot choose a token in it.

There are three reasons. The mask of the row's grammar comes from another process and is not there in time. Or
the grammar has not got the tokens of an earlier engine yet (`grammar/replay.py`). Or the token before was not
final when the step began: the grammar has not accepted it yet, or has replaced it since.

A deferred row is computed but not sampled. So are later rows of its sequence that were planned before this
was known, because their tokens would follow the missing one. The position is computed again when the mask is
there.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from personae.engine.plan import Row
from personae.engine.worker.worker import Forward, PackedStep
from personae.grammar.matcher import Binding
from personae.kernels.upload import upload

STEP_PATIENCE = 0.002  # seconds that a step waits for all such masks together
SHARED_STEP_PATIENCE = 0.0005  # the same for a step with rows of others, which would wait too


def without(forward: Forward, out: list[int], device: torch.device) -> Forward:
    """The step as if the rows of the samples `out` were chunks of a prompt, which choose no token."""
    packed = forward.packed
    others = [i for i in range(len(packed.sampled_rows)) if i not in out]
    fewer = replace(
        packed,
        sampled_rows=[packed.sampled_rows[i] for i in others],
        sampled_slots=[packed.sampled_slots[i] for i in others],
        sampled_ends=[packed.sampled_ends[i] for i in others],
        drafts={others.index(i): drafts for i, drafts in packed.drafts.items() if i in others},
    )
    behind = range(len(packed.sampled_rows), len(packed.sampled))  # the logits of drafts
    logits = forward.logits[upload(np.array([*others, *behind], np.int64), device)]
    return Forward(fewer, forward.hidden, logits)


@dataclass(slots=True)
class _Deferred:
    """`end`: the position of the missing token. `step`: the skipped step, None once it is finished."""

    end: int
    step: int | None


class Deferrals:
    """The slots whose rows are deferred, of the slots with a grammar: `grammars`. `count` is how many of
    these have one in another process, or a replay."""

    def __init__(self) -> None:
        self.grammars: set[int] = set()
        self.count = 0
        # Slots whose token was replaced after the running step had begun with it.
        self._replaced: frozenset[int] = frozenset()
        self._deferred: dict[int, _Deferred] = {}
        self._reported: set[int] = set()  # slots that `resumable` has reported

    def __bool__(self) -> bool:
        """Whether a slot waits that `resumable` has not reported."""
        return len(self._deferred) > len(self._reported)

    @property
    def any(self) -> bool:
        """Whether a row may have to be deferred."""
        return bool(self.count or self._deferred or self._replaced)

    def mark_replaced(self, slots: Iterable[int]) -> None:
        """The step that has begun computes these slots' rows with a token that was replaced."""
        self._replaced = frozenset(slots)

    def leave(self, slot: int, matcher: Binding) -> None:
        """The sequence of a slot with a grammar has left."""
        self.grammars.remove(slot)
        self.count -= matcher.remote or not matcher.ready
        self._deferred.pop(slot, None)
        self._reported.discard(slot)

    def find_deferred(
        self, rows: Iterable[Row], packed: PackedStep, matchers: Mapping[int, Binding]
    ) -> list[int]:
        """The indices of the samples that this step cannot choose. Waits briefly for their masks. `rows` are
        the plan's, which may begin elsewhere than what was packed (`speculation/`)."""
        starts = {row.slot: row.start for row in rows}
        bindings = (matchers.get(slot) for slot in packed.sampled_slots)
        alone = all(one is not None and one.remote for one in bindings)
        deadline = time.monotonic() + (STEP_PATIENCE if alone else SHARED_STEP_PATIENCE)
        out = []
        for i, slot in enumerate(packed.sampled_slots):
            matcher, parked = matchers.get(slot), self._deferred.get(slot)
            late = matcher is not None and not matcher.wait(deadline)
            if late or slot in self._replaced or (parked is not None and starts[slot] >= parked.end):
                out.append(i)
            elif parked is not None:
                del self._deferred[slot]
                self._reported.discard(slot)
        self._replaced = frozenset()
        return out

    def defer(self, step: int, slot: int, end: int) -> None:
        """A row is deferred: its token at `end` is missing, or a token before it."""
        parked = self._deferred.get(slot)
        if parked is None or end == parked.end:
            self._deferred[slot] = _Deferred(end, step)
            self._reported.discard(slot)

    def finished(self, step: int) -> None:
        """The step's result is read, so the rows that it deferred may resume."""
        for parked in self._deferred.values():
            if parked.step == step:
                parked.step = None

    def resumable(self, matchers: Mapping[int, Binding]) -> list[int]:
        """The slots whose masks have arrived, each once."""
        there = []
        for slot, parked in self._deferred.items():
            if parked.step is None and slot not in self._reported and matchers[slot].ready:
                there.append(slot)
        self._reported.update(there)
        return there
