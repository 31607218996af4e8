"""Finds the request that kills Back, so that it takes no others with it.

When Back dies, any of the sequences that it was computing may be the reason. All go back at once, since most
often it was none of them. One that is aboard in a second death, without a token between the two, is suspect:
suspects go back one at a time, the next when the one before has got on. The one on trial when Back dies
again, still without a token, is guilty.
"""

from collections import deque


class Record:
    """What speaks for and against one sequence: deaths of Back in a row in which it had not got on."""

    __slots__ = ("aboard", "deaths", "got_on")

    def __init__(self) -> None:
        self.aboard = False  # it was computed in this life of Back
        self.got_on = False  # brought something in this life
        self.deaths = 0


SUSPECT = 2
GUILTY = 3


class Probation:
    """Decides who goes back to a new life of Back, and when. Knows ids and records, nothing else."""

    def __init__(self) -> None:
        self._trial: str | None = None
        self._held: deque[str] = deque()

    @property
    def waits(self) -> bool:
        """Whether anybody is held."""
        return bool(self._held)

    def judge(self, records: dict[str, Record]) -> tuple[list[str], list[str]]:
        """Back has died: (those that go back now, those that are guilty). The others are held."""
        go: list[str] = []
        guilty: list[str] = []
        self._held.clear()
        for id, record in records.items():
            if record.aboard:
                record.deaths = 1 if record.got_on else record.deaths + 1
            record.got_on = record.aboard = False
            if record.deaths < SUSPECT:
                go.append(id)
            elif record.deaths >= GUILTY and id == self._trial:
                guilty.append(id)
            else:
                self._held.append(id)
        self._trial = None
        return go, guilty

    def next(self, records: dict[str, Record]) -> str | None:
        """Who goes on trial now; None when somebody is on trial, or nobody is held."""
        if self._trial is not None:
            record = records.get(self._trial)
            if record is not None and not record.got_on:
                return None
            self._trial = None
        while self._held:
            id = self._held.popleft()
            if id in records:
                self._trial = id
                return id
        return None
