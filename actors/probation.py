"""Finds the request that kills Back, so that it takes no others with it.

When Back dies of itself, one of the sequences that it was computing may be the reason. Those are known: the
executor notes whom it has aboard before each step (`actors/blackbox.py`). They are suspects, and are tried: one
after the other goes back, the next when the one before has brought a token, and nobody else does meanwhile. What
then kills Back again is guilty: it was aboard in two deaths. The others lose the time of a step each.

A sequence is cleared when it has brought two tokens: a replayed log goes on exactly where it died, and a device
may be a step ahead of what was read. If one that is not cleared yet was aboard as well, both are tried again.

A death from outside (a signal that was not ours) says less: everybody goes back at once. Only those that were
aboard in two of them in a row, without being cleared between, are suspects, and only a fourth one is proof.
"""

from collections import deque
from collections.abc import Container, Mapping


class Record:
    """What speaks for and against one sequence. `deaths` are those of Back, in a row, with it aboard and not
    cleared before; `brought` are tokens in this life."""

    __slots__ = ("brought", "deaths", "suspect")

    def __init__(self) -> None:
        self.brought = 0
        self.deaths = 0
        self.suspect = False


CLEARED = 2  # tokens
GUILTY = 2  # deaths, when it was the only one that was not cleared
CERTAIN = 3  # deaths, whoever else was there
OUTSIDE = 4  # deaths, the last of them from outside


class Probation:
    """Decides who goes back to a new life of Back, and when. Knows ids and records, nothing else."""

    def __init__(self) -> None:
        self._trial: str | None = None
        self._held: deque[str] = deque()  # suspects whose trial is to come
        self._others: list[str] = []  # those who go back after the last trial
        self.over = True  # nobody is tried or held

    def judge(
        self, records: Mapping[str, Record], aboard: Container[str] = (), outside: bool = False
    ) -> list[str]:
        """Back has died with these aboard. Returns those that are guilty; the others wait for `next`."""
        fallen, uncleared = [], []
        for id, record in records.items():
            if record.brought >= CLEARED:
                record.deaths, record.suspect = 0, False
            elif id in aboard:
                uncleared.append(id)
            record.brought = 0
            if id in aboard:
                fallen.append(record)
                record.deaths += 1
                record.suspect = record.suspect or not outside or record.deaths > 1
        guilty = [
            id for id in uncleared if id == self._trial and self._proven(records[id], uncleared, outside)
        ]
        if guilty:
            for record in fallen:  # they were only there
                record.deaths -= 1
                record.suspect = record.deaths > 0
        suspects = [id for id, record in records.items() if record.suspect and id not in guilty]
        self._held = deque(sorted(suspects, key=lambda id: -records[id].deaths))
        self._others = [id for id, record in records.items() if not record.suspect and id not in guilty]
        self._trial = None
        self.over = False
        return guilty

    def next(self, records: Mapping[str, Record]) -> list[str] | None:
        """Who goes back now; None to wait for the trial. When there is no trial left: all others, at once."""
        if self._trial is not None:
            record = records.get(self._trial)
            if record is not None and not record.brought:
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

    def _proven(self, record: Record, uncleared: list[str], outside: bool) -> bool:
        if outside:
            return record.deaths >= OUTSIDE
        return record.deaths >= CERTAIN or (record.deaths >= GUILTY and len(uncleared) == 1)
