"""Finds the request that makes the engine core crash, so that it takes no others with it.

When the engine core crashes by itself, one of the sequences that it was computing may be the reason. They are
known: before each step the executor notes which sequences it has on the device
(`actors/enginecore/step_recorder.py`). These are suspects, and are tried alone. One is resubmitted; the next
one follows when the first is cleared; no other sequence runs meanwhile. If the engine core crashes again, the
one on trial is guilty: it was on the device in two crashes, and the others are cleared. A sequence is cleared
when two steps have brought it tokens: a replayed log goes on exactly where it was, and the device may be one
step ahead of what was read. So each suspect delays the others by two steps.

A death from outside (a signal that this server did not send) says less: all sequences are resubmitted at
once. Only sequences that were on the device in two such deaths in a row, without being cleared between them,
are suspects. Only a fourth one is proof.
"""

from collections import deque
from collections.abc import Container, Mapping


class CrashRecord:
    """The evidence about one sequence. `deaths` counts the deaths of the engine core with it on the device,
    in a row, since it was last cleared. `brought` counts the steps of this epoch that brought it tokens."""

    __slots__ = ("brought", "deaths", "suspect")

    def __init__(self) -> None:
        self.brought = 0
        self.deaths = 0
        self.suspect = False


CLEARED = 2  # steps that brought tokens
GUILTY = 2  # deaths
OUTSIDE = 4  # deaths, the last of them from outside


class Probation:
    """Decides which sequences go back to a new epoch of the engine core, and when. It knows only ids and
    records."""

    def __init__(self) -> None:
        self._trial: str | None = None
        self._held: deque[str] = deque()  # suspects that wait for their trial
        self._others: list[str] = []  # those that go back after the last trial
        self.over = True  # no sequence is on trial or held

    def judge(
        self, records: Mapping[str, CrashRecord], on_device: Container[str] = (), outside: bool = False
    ) -> list[str]:
        """Judge the sequences after the engine core died with those in `on_device` on the device. Returns the
        ones to quarantine; the others wait for `next`."""
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
            for id in died.keys() - guilty:  # the others are not to blame
                died[id].deaths -= 1
                died[id].suspect = died[id].deaths > 0
        suspects = [id for id, record in records.items() if record.suspect and id not in guilty]
        self._held = deque(sorted(suspects, key=lambda id: -records[id].deaths))
        self._others = [id for id, record in records.items() if not record.suspect and id not in guilty]
        self._trial = None
        self.over = False
        return guilty

    def next(self, records: Mapping[str, CrashRecord]) -> list[str] | None:
        """Return which sequences go back now: a suspect, or all others when no trial is left. None means:
        wait for the trial."""
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
