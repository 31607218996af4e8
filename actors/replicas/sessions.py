"""Remembers the replica of each session's last request: a hint for where its next one goes."""

from collections import OrderedDict

from personae.engine.sequence import SequenceLog

SESSIONS = 16_384  # remembered, the latest ones


class Sessions:
    """A session belongs to its tenant: two tenants may use the same name."""

    def __init__(self, most: int = SESSIONS) -> None:
        self._most = most
        self._at: OrderedDict[tuple[str, str | None], int] = OrderedDict()

    def get(self, log: SequenceLog) -> int | None:
        """Return the number of the replica that served this session last."""
        return self._at.get((log.tenant, log.session))

    def note(self, log: SequenceLog, replica: int) -> None:
        """Note that a sequence of this session goes to `replica`."""
        key = (log.tenant, log.session)
        self._at[key] = replica
        self._at.move_to_end(key)
        if len(self._at) > self._most:
            self._at.popitem(last=False)
