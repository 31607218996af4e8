"""Remembers the replica of each session's last request: its pages are there."""

from collections import OrderedDict

from personae.engine.scheduling.sessions import SESSIONS_OF_A_TENANT
from personae.engine.sequence import SequenceLog


class Sessions:
    """A session belongs to its tenant: two tenants may use the same name. Of each tenant the latest `most`
    are remembered."""

    def __init__(self, most: int = SESSIONS_OF_A_TENANT) -> None:
        self._most = most
        self._tenants: dict[str, OrderedDict[str | None, int]] = {}

    def get(self, log: SequenceLog) -> int | None:
        """Return the number of the replica that served this session last."""
        found = self._tenants.get(log.tenant)
        return None if found is None else found.get(log.session)

    def note(self, log: SequenceLog, replica: int) -> None:
        """Note that a sequence of this session goes to `replica`."""
        sessions = self._tenants.setdefault(log.tenant, OrderedDict())
        sessions[log.session] = replica
        sessions.move_to_end(log.session)
        if len(sessions) > self._most:
            sessions.popitem(last=False)
