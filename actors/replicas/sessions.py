"""Where each session was last: a hint for where its next request goes."""

from collections import OrderedDict

from personae.engine.sequence import SequenceLog

SESSIONS = 16_384  # that are remembered, the latest


class Sessions:
    """Sessions are their tenant's: two tenants may use the same name."""

    def __init__(self, most: int = SESSIONS) -> None:
        self._most = most
        self._at: OrderedDict[tuple[str, str | None], int] = OrderedDict()

    def get(self, log: SequenceLog) -> int | None:
        """The number of the replica where a sequence of this session was last."""
        return self._at.get((log.tenant, log.session))

    def note(self, log: SequenceLog, replica: int) -> None:
        """One goes there."""
        key = (log.tenant, log.session)
        self._at[key] = replica
        self._at.move_to_end(key)
        if len(self._at) > self._most:
            self._at.popitem(last=False)
