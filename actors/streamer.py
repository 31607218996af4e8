"""Fans one step's message out to the requests, and keeps the token logs as far as they got.

The logs are what makes a crash of Back a pause: when Back starts anew, every live log that somebody still
listens to is submitted again, its emitted tokens included, and goes on where it was.
"""

from msgspec.structs import replace

from personae import errors
from personae.actors.inbox import Inbox
from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    Close,
    Load,
    Message,
    Open,
    Progress,
    Refused,
    Replay,
    Resubmit,
    StepDone,
)
from personae.engine.sequence import Delta, SequenceLog


class Live:
    """A sequence that has not ended: its log, what it emitted, who listens (None: nobody any more)."""

    __slots__ = ("delivered", "emitted", "inbox", "log", "seen", "started", "told")

    def __init__(self, log: SequenceLog, inbox: Inbox) -> None:
        self.log = log
        self.inbox: Inbox | None = inbox
        self.emitted: list[int] = []
        self.seen = self.delivered = 0  # prompt logprobs of this run through the prompt, and in all
        self.started = False  # in this life of Back
        self.told = False  # something was delivered, in whatever life

    def begin_again(self) -> SequenceLog:
        """For a new life: the log with what has been emitted since, `after` dropped: the leader may be
        gone."""
        self.started = False
        return replace(self.log, tokens=(*self.log.tokens, *self.emitted), after=None)

    def unseen(self, delta: Delta) -> Delta:
        """The delta without what an earlier life of Back already brought: prompt logprobs are computed
        again, and what the cache had is counted once."""
        if self.told and delta.cached is not None:
            delta = replace(delta, cached=None)
        self.told = True
        entries = delta.prompt_logprobs
        if not entries:
            return delta
        # A first chunk begins with the first token's None; whatever came before it is repeated.
        self.seen = 0 if entries[0] is None else self.seen
        skip = max(0, min(self.delivered - self.seen, len(entries)))
        self.seen += len(entries)
        self.delivered = max(self.delivered, self.seen)
        return replace(delta, prompt_logprobs=entries[skip:]) if skip else delta


class Streamer(Actor[Message]):
    """Delivers deltas to inboxes and tells the ingress who started and who ended.

    `load` is a cell that always holds the latest step's figures.
    """

    def __init__(self, ingress: Ref[Message], load: "Latest") -> None:
        self._ingress = ingress
        self._latest = load
        self._live: dict[str, Live] = {}

    async def receive(self, message: Message) -> None:
        """Handle one message."""
        match message:
            case StepDone(deltas=deltas, load=load):
                self._latest.load = load
                self._deliver(deltas)
            case Open(logs=logs, inbox=inbox):
                self._live.update((log.id, Live(log, inbox)) for log in logs)
            case Close(ids=ids):
                for id in ids:
                    if id in self._live:
                        self._live[id].inbox = None
            case Refused():
                self._refuse(message)
            case Replay(life=life):
                self._replay(life)

    def _deliver(self, deltas: tuple[Delta, ...]) -> None:
        started: list[str] = []
        ended: list[str] = []
        for delta in deltas:
            live = self._live.get(delta.id)
            if live is None:
                continue
            if not live.started:
                live.started = True
                started.append(delta.id)
            live.emitted += delta.tokens
            if live.inbox is not None:
                live.inbox.put(live.unseen(delta))
            if delta.finish is not None:
                del self._live[delta.id]
                ended.append(delta.id)
        if started or ended:
            self._ingress.tell(Progress(tuple(started), tuple(ended)))

    def _replay(self, life: int) -> None:
        closed = tuple(id for id, live in self._live.items() if live.inbox is None)
        for id in closed:
            del self._live[id]
        if closed:
            self._ingress.tell(Progress((), closed))
        if self._live:
            self._ingress.tell(Resubmit(tuple(live.begin_again() for live in self._live.values()), life))

    def _refuse(self, refused: Refused) -> None:
        error: type[errors.PersonaeError] = getattr(errors, refused.kind)
        for id in refused.ids:
            live = self._live.pop(id, None)
            if live is not None and live.inbox is not None:
                live.inbox.fail(error(refused.message, param=refused.param))
        self._ingress.tell(Progress((), refused.ids))


class Latest:
    """The load figures of the latest step, for whoever wants to look (`/metrics`)."""

    def __init__(self) -> None:
        self.load = Load()
