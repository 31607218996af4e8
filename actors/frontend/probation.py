"""Finds the request that kills the engine core, so that it takes no others with it.

When the engine core dies of itself, one of the sequences that it was computing may be the reason. Those are
known: the executor notes whom it has aboard before each step (`actors/enginecore/step_recorder.py`). They are
suspects, and are tried: one after the other goes back, the next when the one before is cleared, and nobody
else does meanwhile. The one on trial when the engine core dies again is guilty: it was aboard in two deaths,
and the others are cleared. A sequence is cleared when two steps have brought it tokens: a replayed log goes
on exactly where it died, and a device may be a step ahead of what was read. So the others lose the time of
two steps for each of them.

A death from outside (a signal that was not ours) says less: everybody goes back at once. Only those that were
aboard in two of them in a row, without being cleared between, are suspects, and only a fourth one is proof.
"""

from collections import deque
from collections.abc import Container, Mapping


class CrashRecord:
    """What speaks for and against one sequence. `deaths` are those of the engine core, in a row, with it
    aboard and not cleared before; `brought` are tokens in this epoch, those of one step counted as one."""

    __slots__ = ("brought", "deaths", "suspect")

    def __init__(self) -> None:
        self.brought = 0
        self.deaths = 0
        self.suspect = False


CLEARED = 2  # steps that brought tokens
GUILTY = 2  # deaths
OUTSIDE = 4  # deaths, the last of them from outside


class Probation:
    """Decides who goes back to a new epoch of the engine core, and when. Knows ids and records, nothing
    else."""

    def __init__(self) -> None:
        self._trial: str | None = None
        self._held: deque[str] = deque()  # suspects whose trial is to come
        self._others: list[str] = []  # those who go back after the last trial
        self.over = True  # nobody is tried or held

    def judge(
        self, records: Mapping[str, CrashRecord], on_device: Container[str] = (), outside: bool = False
    ) -> list[str]:
        """The engine core has died with these sequences on the device. Returns those to quarantine; the
        others wait for `next`."""
        died: dict[str, CrashRecord] = {}
        guilty: list[str] = []
        for id, record in records.items():
            if record.brought >= CLEARED:
                record.deaths, record.suspect = 0, False
            record.brought = 0
            if id in on_device:
                died[id] = record
                record.deaths += 1
                record.suspect = record.suspect or not outside or record.deaths > 1
                if id == self._trial and record.deaths >= (OUTSIDE if outside else GUILTY):
                    guilty.append(id)
        if guilty:
            for id in died.keys() - guilty:  # they were only there
                died[id].deaths -= 1
                died[id].suspect = died[id].deaths > 0
        suspects = [id for id, record in records.items() if record.suspect and id not in guilty]
        self._held = deque(sorted(suspects, key=lambda id: -records[id].deaths))
        self._others = [id for id, record in records.items() if not record.suspect and id not in guilty]
        self._trial = None
        self.over = False
        return guilty

    def next(self, records: Mapping[str, CrashRecord]) -> list[str] | None:
        """Who goes back now; None to wait for the trial. When there is no trial left: all others, at once."""
        if self._trial is not None:
            record = records.get(self._trial)
            if record is not None and record.brought < CLEARED:
                return None
            self._trial = None
        while self._held:
            id = self._held.popleft()
            if id in records:
                self._trial = id
                return [id]
        self.over = True
        others, self._others = self._others, []
        return [id for id in others if id in records]
