"""Rows that sit a step out: their grammar's mask is made by another process, and is not there in time.

Such a row is computed and not sampled, and so is whatever was planned behind it before that was known: a row
whose token would stand behind the one that is missing. The position is computed again when the mask is there.
"""

import time
from collections.abc import Mapping
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
    """Which slots sit out. `count` is how many have such a grammar; where it is 0 nothing is asked here."""

    def __init__(self) -> None:
        self.count = 0
        self._parked: dict[int, _Parked] = {}
        self._told: set[int] = set()  # slots of which it was said that they may go on

    def __bool__(self) -> bool:
        """Whether somebody waits of whom it was not said that the mask is there."""
        return len(self._parked) > len(self._told)

    def leave(self, slot: int, matcher: RemoteMatcher) -> None:
        """A slot's sequence is gone."""
        matcher.end()
        self.count -= 1
        self._parked.pop(slot, None)
        self._told.discard(slot)

    def sits_out(self, packed: PackedStep, matchers: Mapping[int, Binding]) -> list[int]:
        """The samples of a step that cannot be taken, by their place among them. Waits a little."""
        deadline = time.monotonic() + STEP_PATIENCE
        out = []
        for i, (slot, end) in enumerate(zip(packed.sampled_slots, packed.sampled_ends, strict=True)):
            matcher = matchers.get(slot)
            if not isinstance(matcher, RemoteMatcher):
                continue
            parked = self._parked.get(slot)
            if (parked is not None and end > parked.end) or not matcher.wait(deadline):
                out.append(i)
            elif parked is not None:
                del self._parked[slot]
                self._told.discard(slot)
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
            if parked.step is None and slot not in self._told:
                assert isinstance(matcher, RemoteMatcher)
                if matcher.ready:
                    there.append(slot)
        self._told.update(there)
        return there
