"""Rows that sit a step out: their grammar's mask is made by another process, and is not there in time; or
their grammar has not said yet whether the token before may be taken, or has replaced it since the step began.

Such a row is computed and not sampled, and so is whatever was planned behind it before that was known: a row
whose token would stand behind the one that is missing. The position is computed again when the mask is there.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from personae.engine.worker.worker import PackedStep
from personae.grammar.backend import Binding
from personae.grammar.sandbox.masks import RemoteMatcher

STEP_PATIENCE = 0.002  # seconds that a step waits for such masks, all together


@dataclass(slots=True)
class _Parked:
    """The position of the token that is missing; the step that was sat out, None once it is finished."""

    end: int
    step: int | None


class Deferrals:
    """Which slots sit out. `count` is how many have a grammar in another process."""

    def __init__(self) -> None:
        self.count = 0
        self._misread: frozenset[int] = (
            frozenset()
        )  # slots: the step that runs has a token that is not theirs
        self._parked: dict[int, _Parked] = {}
        self._told: set[int] = set()  # slots of which it was said that they may go on

    def __bool__(self) -> bool:
        """Whether somebody waits of whom it was not said that the mask is there."""
        return len(self._parked) > len(self._told)

    @property
    def any(self) -> bool:
        """Whether a row may have to sit out; if not, nothing is asked here."""
        return bool(self.count or self._parked or self._misread)

    def misread(self, slots: Iterable[int]) -> None:
        """The step that has begun computes these slots' rows with a token that has been replaced since."""
        self._misread = frozenset(slots)

    def leave(self, slot: int, matcher: Binding) -> None:
        """A slot's sequence is gone."""
        if isinstance(matcher, RemoteMatcher):
            matcher.end()
            self.count -= 1
        self._parked.pop(slot, None)
        self._told.discard(slot)

    def sits_out(self, packed: PackedStep, matchers: Mapping[int, Binding]) -> list[int]:
        """The samples of a step that cannot be taken, by their place among them. Waits a little."""
        deadline = time.monotonic() + STEP_PATIENCE
        out = []
        for i, (slot, end) in enumerate(zip(packed.sampled_slots, packed.sampled_ends, strict=True)):
            matcher, parked = matchers.get(slot), self._parked.get(slot)
            late = isinstance(matcher, RemoteMatcher) and not matcher.wait(deadline)
            if late or slot in self._misread or (parked is not None and end > parked.end):
                out.append(i)
            elif parked is not None:
                del self._parked[slot]
                self._told.discard(slot)
        self._misread = frozenset()
        return out

    def defer(self, step: int, slot: int, end: int) -> None:
        """A row sits a step out, that of an earlier one that does, or the token at `end` is missing."""
        parked = self._parked.get(slot)
        if parked is None or end == parked.end:
            self._parked[slot] = _Parked(end, step)
            self._told.discard(slot)

    def finished(self, step: int) -> None:
        """What a step brought is known: whoever sat it out may be told to go on."""
        for parked in self._parked.values():
            if parked.step == step:
                parked.step = None

    def resumable(self, matchers: Mapping[int, Binding]) -> list[int]:
        """The slots whose masks have come, each once."""
        there = []
        for slot, parked in self._parked.items():
            matcher = matchers[slot]
            finished = parked.step is None and slot not in self._told
            if finished and (not isinstance(matcher, RemoteMatcher) or matcher.ready):
                there.append(slot)
        self._told.update(there)
        return there
