"""Sits in front of several replicas: admits submissions or refuses them, and decides which request goes next
and to which replica.

Requests wait here, not at the replicas. Each replica has only a few waiting requests of each (tenant,
adapter). So a replica is chosen as late as possible, and fairness holds over all replicas. When an engine
core dies, its replica hands all its streams over. Streams that are not suspects continue at another replica
at once, token for token, since a stream is its log. Suspects are tried alone (`suspects.py`).
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from anyio import Event, current_time
from msgspec.structs import replace

from personae.actors.frontend.ingress import overloaded, retry_after
from personae.actors.frontend.live_stream import QUARANTINED, LiveStream
from personae.actors.kit.actor import Actor
from personae.actors.kit.signal import Signal
from personae.actors.messages import (
    ChangeRole,
    Drain,
    HandOver,
    Message,
    NoEngine,
    Orphaned,
    Prefilled,
    ReplicaLost,
    ReplicaProgress,
    ReplicaUp,
    Shutdown,
    Submission,
    Transfer,
    Withdraw,
)
from personae.actors.replicas.cold_start import ColdStart
from personae.actors.replicas.goodput import Goodput
from personae.actors.replicas.placement.base import Placement, PlacementRequest
from personae.actors.replicas.prefixes import BLOCK
from personae.actors.replicas.replica import Placed, Replica, ReplicaState
from personae.actors.replicas.sessions import Sessions
from personae.actors.replicas.suspects import Suspects
from personae.actors.replicas.waiting import Group, WaitingGroups
from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.sequence import SequenceLog
from personae.errors import EngineLost, Overloaded, PersonaeError, Quarantined, TargetOutOfReach

log = logging.getLogger("personae.actors")

INITIAL_ANSWER = 128.0  # tokens that an answer is expected to have, until some have ended
SMOOTHING = 0.05  # weight of each new answer in the mean
LONGEST_QUEUE = 1.0  # prompts before one for a prefill engine, in times its length; else another computes it
MAX_SKIPPED = 32  # keys without room that are skipped in a row


class LongPrompts(NamedTuple):
    """Prompts that make a step more than twice as long: how many were placed, the seconds of computing that
    they take as measured, and the seconds that the prompts which wait will take."""

    number: int
    seconds: float
    waiting: float


class Dispatcher(Actor[Message]):
    """Knows every live sequence and its replica.

    `replicas` holds the current replicas. `max_live` bounds the sequences that are served at once. `policy`
    decides which key goes next, `placement` decides where. There may be no replica at all: then `asked` is
    set for each request, and `cold_start` says how long one takes to start.
    """

    def __init__(
        self,
        replicas: Mapping[int, Replica],
        placement: Placement,
        policy: FairnessPolicy,
        max_live: int,
        asked: Signal,
        cold_start: ColdStart,
    ) -> None:
        self._asked, self._cold_start = asked, cold_start
        self._no_engine: tuple[Overloaded, float] | None = None  # and until when requests get this error
        self.goodput = Goodput()
        self._replicas = replicas
        self._placement = placement
        self._policy = policy
        self._max_live = max_live
        self._live: dict[str, Placed] = {}
        self._keys: Counter[FairnessKey] = Counter()  # of live sequences
        self._waiting = WaitingGroups(policy)
        self._returning: list[Group] = []  # groups whose replica died
        self._suspects = Suspects()
        self._sessions = Sessions()
        self._trial_replica: Replica | None = None  # where suspects are tried
        self._draining: dict[int, Event] = {}  # set when the replica has no streams left
        self._withdrawn: set[str] = set()  # ids of sequences that have not ended yet
        self._mean_answer = INITIAL_ANSWER
        self._shutdown_error: PersonaeError | None = None
        self.moved = 0
        self._long_number, self._long_seconds = 0, 0.0  # of placed prompts that make a step much longer
        self.prefilled = 0  # sequences whose prompt was computed by a replica that does only that
        self.changed = 0  # sequences that went on in another numerics class

    async def receive(self, message: Message) -> None:
        """Handle one message, then place the requests that can be placed."""
        match message:
            case Submission():
                self._admit(message)
            case Withdraw(ids=ids):
                self._withdraw(ids)
            case Shutdown(error=error):
                self._shutdown(error)
            case NoEngine(error=error):
                self._no_engine = error, current_time() + (error.retry_after or 0.0)
                self._fail_waiting(error)
            case (
                ReplicaProgress()
                | Orphaned()
                | Prefilled()
                | ReplicaUp()
                | ReplicaLost()
                | ChangeRole()
                | Drain()
                | HandOver()
            ):
                self._handle_replica(message)
        if self._draining:
            self._end_drains()
        self._dispatch()

    @property
    def refuses(self) -> bool:
        """Whether requests are refused, since no engine could be started a moment ago."""
        return self._no_engine is not None and not self._replicas and current_time() < self._no_engine[1]

    @property
    def live(self) -> int:
        """How many sequences have not ended."""
        return len(self._live)

    def backlog_seconds(self) -> float:
        """Return how long it takes to compute the work that waits, here and at the replicas. While none
        serves, until one does."""
        if not any(replica.up for replica in self._replicas.values()):
            return self._cold_start.left if self._live else 0.0
        backlogs = [replica.frontend.latest.backlog for replica in self._replicas.values()]
        rate = sum(backlog.rate for backlog in backlogs)
        tokens = self._waiting.demand.total() + sum(backlog.tokens for backlog in backlogs)
        return tokens / rate if rate else 0.0

    @property
    def long_prompts(self) -> "LongPrompts":
        """Long prompts: how many have an engine, how long these take, and how long the waiting ones do."""
        waiting = self._waiting.prompts.total() * self._token_seconds()
        return LongPrompts(self._long_number, self._long_seconds, waiting)

    def waiting(self) -> Iterator[SequenceLog]:
        """The sequences that are at no replica."""
        yield from self._waiting
        for group in self._returning:
            yield from group.logs

    # Clients

    def _admit(self, submission: Submission) -> None:
        logs = submission.logs
        if self._shutdown_error is not None:
            submission.reply.fail(self._shutdown_error)
            return
        if self.refuses and self._no_engine is not None:
            submission.reply.fail(self._no_engine[0])
            return
        if len(self._live) + len(logs) > self._max_live:
            submission.reply.fail(overloaded(len(self._live), self._max_live, self.backlog_seconds()))
            return
        groups = _by_leader(logs)
        if (refusal := self._refuse_by_target(groups)) is not None:
            submission.reply.fail(refusal)
            return
        now = current_time()
        for mine in groups:
            streams = [LiveStream(each, submission.inbox, now) for each in mine]
            group = Group(streams, mine, self._expected_answer(mine[0]))
            if (targets := mine[0].targets) is not None and targets.first is not None:
                group.due = now + targets.first - len(mine[0].tokens) * self._token_seconds()
            for stream in streams:
                self._live[stream.log.id] = Placed(stream, group.key)
            self._keys[group.key] += len(mine)
            self._waiting.push(group)
        if not self._replicas:
            self._asked.set()
        submission.reply.tell(None)

    def _refuse_by_target(self, groups: Sequence[Sequence[SequenceLog]]) -> TargetOutOfReach | None:
        """Return the refusal if a group asks to be refused when its first token cannot come in time."""
        for mine in groups:
            targets = mine[0].targets
            if targets is None or not targets.refuse or targets.first is None:
                continue
            seconds = self._first_token_seconds(mine)
            if seconds > targets.first:
                return TargetOutOfReach(
                    f"The first token would come after about {seconds:.2f} s, and `x-slo-ttft-ms` asks for "
                    f"{targets.first:.2f} s.",
                    retry_after=retry_after(seconds),
                )
        return None

    def _first_token_seconds(self, logs: Sequence[SequenceLog]) -> float:
        """Estimate the seconds until the first token of this group: until its tenant's earlier prompts are
        placed, then at the replica where it would go now."""
        up = [replica for replica in self._replicas.values() if replica.up]
        if not up:
            return self._cold_start.left if self._cold_start.begun or not self._replicas else math.inf
        group = Group([], list(logs), 0)
        before = self._waiting.prompts[group.key.tenant] * self._token_seconds() / len(up)
        return before + min(each.first_token_seconds(group) for each in up)

    def _token_seconds(self) -> float:
        """Seconds per prompt token at the fastest replica."""
        return min((each.token_seconds for each in self._replicas.values() if each.up), default=0.0)

    def _expected_answer(self, log: SequenceLog) -> int:
        """How many more tokens the answer is likely to have."""
        left = log.params.max_tokens - (len(log.tokens) - log.prompt_length)
        return min(left, round(self._mean_answer))

    def _withdraw(self, ids: Iterable[str]) -> None:
        at: dict[int, list[str]] = {}
        for id in ids:
            if (placed := self._live.get(id)) is None:
                continue
            if placed.replica is not None:
                self._withdrawn.add(id)
                at.setdefault(placed.replica.index, []).append(id)
                continue
            if not self._suspects.drop(id) and not self._waiting.drop(id):
                self._returning = [group for group in self._returning if group.logs[0].id != id]
            self._end(placed)
        for index, mine in at.items():
            self._replicas[index].frontend.ingress.tell(Withdraw(tuple(mine)))

    def _end(self, placed: Placed) -> None:
        """Remove a sequence that has ended."""
        id = placed.stream.log.id
        del self._live[id]
        self._withdrawn.discard(id)
        self._suspects.acquit(id)
        if placed.replica is not None:
            placed.replica.release(placed)
        self._charge(placed)
        key = placed.key
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
            self._policy.forget(key)

    def _shutdown(self, error: PersonaeError) -> None:
        self._shutdown_error = error
        self._fail_waiting(error)
        for replica in self._replicas.values():
            replica.frontend.ingress.tell(Shutdown(error))

    def _fail_waiting(self, error: PersonaeError) -> None:
        """End the streams that are at no replica."""
        for placed in tuple(self._live.values()):
            stream = placed.stream
            if placed.replica is None:
                if stream.inbox is not None:
                    stream.inbox.fail(error)
                self._withdraw((stream.log.id,))

    # Replicas

    def _handle_replica(
        self,
        message: ReplicaProgress
        | Orphaned
        | Prefilled
        | ReplicaUp
        | ReplicaLost
        | ChangeRole
        | Drain
        | HandOver,
    ) -> None:
        """Handle a message about a replica. One about a removed replica comes too late and changes
        nothing."""
        replica = self._replicas.get(message.replica)
        if replica is None:
            return
        match message:
            case ReplicaProgress():
                self._progress(replica, message)
            case Orphaned():
                self._take_back(replica, message)
            case Prefilled(streams=streams):
                self._go_on(replica, streams)
            case ReplicaUp():
                self._come_up(replica)
            case ReplicaLost():
                self._lose(replica)
            case ChangeRole(prefill=prefill):
                replica.prefill = prefill
                self._waiting.unpark()
            case Drain(drained=drained):
                self._drain(replica, drained)
            case HandOver():
                replica.frontend.streamer.tell(message)

    def _progress(self, replica: Replica, progress: ReplicaProgress) -> None:
        if self._waiting:
            for placed in replica.live.values():
                self._charge(placed)
        for id in progress.admitted:
            replica.admit(id)
        for id in progress.cleared:
            self._suspects.acquit(id)
        for id in progress.ended:
            if id in replica.live:
                placed = replica.live[id]
                self._mean_answer += SMOOTHING * (len(placed.stream.emitted) - self._mean_answer)
                self.goodput.note(placed.stream, current_time())
                self._end(placed)
        if progress.admitted or progress.ended:
            self._waiting.unpark()

    def _take_back(self, replica: Replica, orphaned: Orphaned) -> None:
        """Take back a replica's streams: its engine core has died (perhaps before they arrived), or it
        drains."""
        if replica.up:
            replica.state = ReplicaState.STARTING
            replica.forget()
        if replica is self._trial_replica:
            self._trial_replica = None
        wanted = self._leave(replica, orphaned.streams)
        free, guilty = self._suspects.judge(wanted, orphaned.on_device, orphaned.outside)
        for stream in guilty:
            stream.log_quarantine()
            if stream.inbox is not None:
                stream.inbox.fail(Quarantined(QUARANTINED))
            self._end(self._live[stream.log.id])
        for stream in free:
            again = stream.begin_again()
            self._returning.append(Group([stream], [again], self._expected_answer(again)))
        if self._shutdown_error is not None:
            self._shutdown(self._shutdown_error)
        self._waiting.unpark()

    def _leave(self, replica: Replica, streams: Sequence[LiveStream]) -> list[LiveStream]:
        """Note that no replica has these streams. Returns the streams that a client still wants."""
        wanted: list[LiveStream] = []
        for stream in streams:
            placed = self._live[stream.log.id]
            replica.release(placed)
            if stream.log.id in self._withdrawn:
                self._end(placed)
            else:
                wanted.append(stream)
        return wanted

    def _go_on(self, replica: Replica, streams: Sequence[LiveStream]) -> None:
        """Have other replicas go on with streams whose prompts this one has computed."""
        self.prefilled += len(streams)
        for stream in self._leave(replica, streams):
            self._suspects.acquit(stream.log.id)
            stream.record.brought = 0
            again = stream.begin_again()
            answer = self._expected_answer(again)
            self._returning.append(Group([stream], [again], answer, replica.index))
        if self._shutdown_error is not None:
            self._shutdown(self._shutdown_error)
        self._waiting.unpark()

    def _come_up(self, replica: Replica) -> None:
        """The replica's engine core has started."""
        if replica.state is ReplicaState.STARTING:
            replica.state = ReplicaState.UP
            self._waiting.unpark()

    def _drain(self, replica: Replica, drained: Event) -> None:
        """Send nothing more to this replica."""
        replica.state = ReplicaState.DRAINING
        self._draining[replica.index] = drained
        if self._trial_replica is replica:
            self._trial_replica = None

    def _end_drains(self) -> None:
        """Signal each drain whose replica has no streams left."""
        for index, drained in tuple(self._draining.items()):
            if not self._replicas[index].live:
                drained.set()
                del self._draining[index]

    def _lose(self, replica: Replica) -> None:
        """The replica's engine core will not be started again."""
        if replica.state is not ReplicaState.DRAINING:  # a draining one is about to be removed in any case
            replica.state = ReplicaState.LOST
        if self._trial_replica is replica:
            self._trial_replica = None
        gone = (ReplicaState.LOST, ReplicaState.DRAINING)
        left = sum(other.state not in gone for other in self._replicas.values())
        if left:
            log.error(
                "replica %d failed too often and will not be restarted; %d are left", replica.index, left
            )
            return
        self._shutdown(EngineLost("The engine has failed and will not be restarted; ask another replica."))

    # Placing

    def _dispatch(self) -> None:
        """Place what can be placed: a suspect alone, then groups that lost their replica, then the others by
        fairness."""
        if not (self._suspects.over and not self._returning and not self._waiting.keys):
            self._try_suspects()
            replicas = [
                each for each in self._replicas.values() if each.up and each is not self._trial_replica
            ]
            if replicas:
                self._place_waiting(replicas)

    def _place_waiting(self, replicas: Sequence[Replica]) -> None:
        returning, self._returning = self._returning, []
        for orphan in returning:
            self._choose(orphan, _same_numerics(orphan.streams[0], replicas), returns=True)
            self.moved += orphan.source is None
        skipped, now = 0, current_time()
        while skipped < MAX_SKIPPED and (group := self._waiting.choose(now)) is not None:
            if self._choose(group, replicas):
                skipped = 0
            else:
                self._waiting.park(group.key)
                skipped += 1

    def _choose(self, group: Group, replicas: Sequence[Replica], *, returns: bool = False) -> bool:
        """Choose a replica for one group and send it there. Returns False if no replica has room."""
        replica: Replica | None
        replicas, prefill = self._by_role(group, replicas, returns=returns)
        if not replicas:
            return False
        if len(replicas) == 1:
            replica = replicas[0] if returns or replicas[0].has_room(group.key) else None
        else:
            replica = self._placed_by_policy(group, replicas, returns=returns)
        if replica is None:
            return False
        if not returns:
            self._waiting.take(group)
            self._policy.charge(group.key, replica.uncached(group), 0)
        if group.source is None and (prefill or not replica.takes_along(group)):
            self._long_number += 1
            self._long_seconds += replica.uncached(group) * replica.prompt_token_seconds
        self._send(group, replica, prefill=prefill)
        return True

    def _by_role(
        self, group: Group, replicas: Sequence[Replica], *, returns: bool
    ) -> tuple[Sequence[Replica], bool]:
        """The replicas that may compute a group now, and whether they only compute its prompt. Any replica
        does all if it has to."""
        computing = [replica for replica in replicas if replica.prefill]
        answering = [replica for replica in replicas if not replica.prefill]
        if not computing or not answering:
            return replicas, False
        if group.source is not None:
            return answering, False
        log = group.logs[0]
        if ends_with_prompt(log):
            return computing, False
        if not returns and not any(replica.takes_turns(group.key) for replica in answering):
            return (), False
        here = min(answering, key=lambda replica: replica.first_token_seconds(group))
        there = min(replica.first_token_seconds(group) for replica in computing)
        there += here.step_seconds  # to go on here with the pages costs a step more
        ahead = min(replica.waiting_prompts for replica in computing)
        ahead += (self._waiting.prompts.total() - group.prompt) // len(computing)
        if ahead > LONGEST_QUEUE * group.prompt and not returns:
            return answering, False
        if here.takes_along(group) and here.first_token_seconds(group) <= there:
            return answering, False
        return computing, True

    def _placed_by_policy(
        self, group: Group, replicas: Sequence[Replica], *, returns: bool
    ) -> Replica | None:
        adapter = group.key.adapter
        demand = self._waiting.demand[adapter] + sum(replica.demand[adapter] for replica in replicas)
        session = self._sessions.get(group.logs[0]) if group.logs[0].session is not None else None
        return self._placement.choose(PlacementRequest(group, demand, returns, session), replicas)

    def _send(self, group: Group, replica: Replica, *, trial: bool = False, prefill: bool = False) -> None:
        if group.logs[0].session is not None and not prefill:
            self._sessions.note(group.logs[0], replica.index)
        for stream in group.streams:
            self.changed += stream.serve_at(replica.numerics)
        logs = tuple(group.logs)
        pages_at = self._pages_at(group, replica)
        if prefill or pages_at is not None:
            logs = tuple(replace(log, pages_at=pages_at, prefill=prefill) for log in logs)
        replica.promise(group, [self._live[log.id] for log in group.logs])
        replica.frontend.ingress.tell(Transfer(tuple(group.streams), logs, trial))

    def _pages_at(self, group: Group, replica: Replica) -> str | None:
        """Where a replica can get pages of the group's prompt that it has not got; None: nowhere."""
        if replica.page_address is None:
            return None
        source = None if group.source is None else self._replicas.get(group.source)
        if source is not None and source is not replica:
            return source.page_address
        best, fewest = None, replica.uncached(group) - BLOCK
        for other in self._replicas.values():
            serves = other.state in (ReplicaState.UP, ReplicaState.DRAINING)
            if not serves or other is replica or other.numerics != replica.numerics:
                continue
            if (left := other.uncached(group)) <= fewest:
                best, fewest = other.page_address, left - 1
        return best

    def _charge(self, placed: Placed) -> None:
        """Charge the tokens that the sequence emitted since the last time to its key."""
        emitted = len(placed.stream.emitted)
        if emitted > placed.charged:
            self._policy.charge(placed.key, 0, emitted - placed.charged)
            placed.charged = emitted

    def _try_suspects(self) -> None:
        """Send the next suspect to a replica that has no other streams."""
        suspects = self._suspects
        if suspects.over:
            self._trial_replica = None
        elif suspects.on_trial is None:
            self._trial_replica = self._find_trial_replica()
            if self._trial_replica is not None and (stream := suspects.next()) is not None:
                again = stream.begin_again()
                group = Group([stream], [again], self._expected_answer(again))
                self._send(group, self._trial_replica, trial=True)

    def _find_trial_replica(self) -> Replica | None:
        """Return the replica where suspects are tried: the same one while it lives, else an empty one if
        others can serve. None: wait for one that starts again."""
        if self._trial_replica is not None:
            return self._trial_replica
        up = [replica for replica in self._replicas.values() if replica.up]
        starting = any(replica.state is ReplicaState.STARTING for replica in self._replicas.values())
        if not up or (len(up) == 1 and starting):
            return None
        emptiest = min(up, key=lambda replica: (len(replica.live), replica.index))
        return emptiest if not emptiest.live or not starting else None


def ends_with_prompt(log: SequenceLog) -> bool:
    """Whether there is little or nothing to compute after the prompt, or no page of it may be reused."""
    params = log.params
    return params.pooling is not None or params.prompt_logprobs is not None or params.max_tokens <= 1


def _same_numerics(stream: LiveStream, replicas: Sequence[Replica]) -> Sequence[Replica]:
    """The replicas of the numerics class that computed the stream's tokens so far; all of them if there is
    none."""
    if not stream.emitted:
        return replicas
    return [each for each in replicas if each.numerics == stream.numerics] or replicas


def _by_leader(logs: Sequence[SequenceLog]) -> list[list[SequenceLog]]:
    """Group the sequences that share a prompt. Each leader comes before the sequences that follow it."""
    groups: dict[str, list[SequenceLog]] = {}
    at: dict[str, str] = {}
    for each in logs:
        leader = at.get(each.after or "", each.id)
        at[each.id] = leader
        groups.setdefault(leader, []).append(each)
    return list(groups.values())
