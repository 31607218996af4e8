"""Roles by load: how many replicas only compute prompts, while the others go on with the answers.

A long prompt makes a step longer, and all answers of its replica pause. A replica that only computes prompts
takes that away. It costs a replica for the answers, whose steps then have more rows. So the policy compares
two measured times: how much longer a long prompt makes a step, and how much longer more rows make it.
"""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from anyio import current_time, sleep

from personae.actors.kit.actor import Actor
from personae.actors.messages import ChangeRole, Message
from personae.actors.replicas.replica import Replica
from personae.actors.replicas.replica_set import ReplicaSet

EVERY = 1.0  # seconds between two looks
WINDOW = 10.0  # seconds over which the work of prompts is averaged, and in which waiting prompts should begin
PATIENCE = 5.0  # seconds for which more prefill engines would have been better, before there are more
CALM = 30.0  # seconds for which fewer would have been better, before there are fewer
FULL = 0.8  # the share of its time that a new prefill engine should compute at most
OVERFULL = 0.95  # beyond this share it needs another one
SLACK = 1.25  # so many times as many prompts still need no more engines, before one of them leaves
LEAST = 0.05  # seconds of long prompts a second, below which no engine is kept for them

log = logging.getLogger("personae.actors")


class RoleLoad(NamedTuple):
    """`prefill` of the `serving` replicas only compute prompts. `prompts`: seconds of long prompts that come
    in a second. `longer`: the seconds by which one of them makes a step longer. `rows` answers are computed;
    a replica has `slots` for them. `step` says how many seconds a step of so many rows takes."""

    serving: int
    prefill: int
    prompts: float
    longer: float
    rows: int
    slots: int
    step: Callable[[int], float]


class RolePolicy:
    """Decides how many replicas should only compute prompts."""

    def __init__(self) -> None:
        self._differs: tuple[bool, float] | None = None  # whether more would be better, and since when

    def wanted(self, now: float, load: RoleLoad) -> int:
        """How many replicas should only compute prompts from now on."""
        best = self.best(load)
        if best == load.prefill:
            self._differs = None
            return best
        more = best > load.prefill
        if self._differs is None or self._differs[0] is not more:
            self._differs = more, now
        if now - self._differs[1] < (PATIENCE if more else CALM):
            return load.prefill
        self._differs = None
        return best

    def best(self, load: RoleLoad) -> int:
        """How many would be best if the load stayed as it is. What there is stays if it is about right."""
        needed = _needed(load.prompts)
        if load.prompts <= OVERFULL * load.prefill and _needed(load.prompts * SLACK) >= load.prefill:
            needed = load.prefill
        return needed if needed and _pays(load, needed) else 0


def _needed(prompts: float) -> int:
    """How many engines compute so many seconds of prompts a second."""
    return math.ceil(prompts / FULL) if prompts >= LEAST else 0


def _pays(load: RoleLoad, prefill: int) -> bool:
    """Whether the other replicas have room for all answers, and their steps stay shorter than those of
    replicas that compute long prompts, too."""
    others = load.serving - prefill
    if others < 1 or load.rows > others * load.slots:
        return False
    apart, together = (math.ceil(load.rows / engines) for engines in (others, load.serving))
    return load.step(apart) <= load.step(together) + load.longer


class RoleChooser(Actor[Message]):
    """Has the dispatcher change the roles of replicas as the policy decides."""

    def __init__(self, replicas: ReplicaSet, policy: RolePolicy) -> None:
        self._replicas, self._policy = replicas, policy
        self._seen = 0.0  # seconds of long prompts up to the last look
        self._rate = 0.0  # of them a second, smoothed

    async def started(self) -> None:
        """Begin to look."""
        self.start_soon(self._watch)

    async def receive(self, message: Message) -> None:
        """Nobody sends it messages."""
        raise TypeError(f"the role chooser has no message {type(message).__name__}")

    async def _watch(self) -> None:
        while True:
            await sleep(EVERY)
            up = [replica for replica in self._replicas.replicas.values() if replica.up]
            load = self._load(up)
            wanted = self._policy.wanted(current_time(), load)
            if wanted != load.prefill:
                log.info(
                    "from %d to %d prefill engines: %.2f s of long prompts a second, %d answers",
                    load.prefill,
                    wanted,
                    load.prompts,
                    load.rows,
                )
            for replica in _changing(up, wanted - load.prefill):
                self._replicas.ingress.tell(ChangeRole(replica.index, not replica.prefill))

    def _load(self, up: list[Replica]) -> RoleLoad:
        long = self._replicas.long_prompts
        self._rate += ((long.seconds - self._seen) / EVERY - self._rate) * EVERY / WINDOW
        self._seen = long.seconds
        batch = max((each.batch * each.prompt_token_seconds for each in up), default=0.0)
        return RoleLoad(
            len(up),
            sum(each.prefill for each in up),
            self._rate + long.waiting / WINDOW,
            min(long.seconds / max(long.number, 1), batch),
            sum(len(each.live) - each.waiting for each in up),
            min((each.seqs for each in up), default=1),
            lambda rows: max((each.frontend.latest.step_seconds(rows) for each in up), default=0.0),
        )


def _changing(up: list[Replica], more: int) -> list[Replica]:
    """The replicas to change so that there are this many `more` prefill engines: those with the least to
    do."""
    found = [each for each in up if each.prefill is (more < 0)]
    return sorted(found, key=lambda each: (len(each.live), each.index))[: abs(more)]
