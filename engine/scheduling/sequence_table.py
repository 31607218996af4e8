"""The state of every sequence, and all transitions between states."""

import math
from collections import Counter
from collections.abc import Collection

from personae.engine.plan import FetchPage, MemoryLayout
from personae.engine.scheduling.background import TieredPolicy
from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.live import LiveSequence, SequenceState, StagedPages, turn
from personae.engine.scheduling.page_ledger import PageLedger
from personae.engine.scheduling.regions import Region
from personae.engine.scheduling.row_shares import RowShares
from personae.engine.scheduling.running import RunningTable
from personae.engine.scheduling.slot_quota import RECENT_SECONDS, Claim, OneTenant, SlotQuota
from personae.engine.scheduling.step_time import LONGEST_FACTOR, StepTime
from personae.engine.scheduling.waiting import WaitingQueue
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import EngineCounters
from personae.engine.tiers.tier import PageFetch, TierIndex

LONGEST_FETCHES = (0.05, 5.0)  # seconds: at least; if it is not known how long computing takes


class SequenceTable:
    """All sequences that have not ended, each in exactly one state (see `SequenceState`).

    `news` are endings that no step's result contains. They are cleared when they are delivered. `counters`
    are the engine's. `fetches` are to be begun, and cleared then. `times` are the engine's step times.
    `background_policy` ranks background sequences, from the first one on; without it `policy` does.
    `quota` shares slots and steps among tenants; None while there is one tenant, or without `sharing`.
    """

    __slots__ = (
        "_alive",
        "_arrivals",
        "_arrived",
        "_background_policy",
        "_claim",
        "_foreground",
        "_layout",
        "_now",
        "_only",
        "_room_for",
        "_row",
        "_sharing",
        "_tier",
        "_times",
        "counters",
        "fetches",
        "fetching",
        "left_out",
        "news",
        "over_quota_tenants",
        "policy",
        "quota",
        "returning",
        "row_shares",
        "running",
        "sequences",
        "waiting",
    )

    def __init__(
        self,
        layout: MemoryLayout,
        policy: FairnessPolicy,
        background_policy: FairnessPolicy | None = None,
        *,
        sharing: bool = False,
        tier: TierIndex | None = None,
        times: StepTime | None = None,
        ledger: PageLedger | None = None,
    ) -> None:
        self._layout = layout
        self.policy = policy
        self._background_policy = background_policy
        self._alive: Counter[FairnessKey] = Counter()
        self._arrivals = 0
        self._arrived: Counter[FairnessKey] = Counter()  # since the key had no sequence
        self.quota: SlotQuota | None = None
        self._sharing = sharing
        self._now = 0.0
        self._foreground = 0  # sequences that are not background
        self._only: OneTenant | None = None  # the last one that was here, while there is no quota
        self._room_for: LiveSequence | None = None  # others have given up what it needs
        self._claim: LiveSequence | None = None  # see SlotQuota
        self.over_quota_tenants: list[str] = []  # see SlotQuota
        self.left_out: set[LiveSequence] = set()  # see RowShares
        self.counters = EngineCounters()
        self.sequences: dict[str, LiveSequence] = {}
        self.running = RunningTable(layout, tier, ledger)
        self._tier = tier
        self._times = times or StepTime()
        self.row_shares = RowShares(self._times)
        self._row = 1.0  # prompt tokens that a row of the step counts as
        self.fetching: dict[int, LiveSequence] = {}  # by ticket
        self.fetches: list[PageFetch] = []
        self.waiting = WaitingQueue(policy)
        self.returning: dict[LiveSequence, int] = {}  # the last step with a row of the sequence
        self.news: dict[str, Delta] = {}

    def enter(self, log: SequenceLog) -> LiveSequence:
        """A sequence arrives: it follows its leader, or waits. Raises ValueError if its id is taken."""
        if log.id in self.sequences or log.id in self.news:
            raise ValueError(f"sequence {log.id!r} already exists")
        if log.background and self._background_policy is not None:
            self.policy = TieredPolicy(self.policy, self._background_policy, waiting=self.waiting.keys)
            self.waiting.policy, self._background_policy = self.policy, None
        leader = None if log.after is None else self.sequences.get(log.after)
        sequence = LiveSequence(log, self._arrivals, self._layout)
        sequence.turn = turn(log, self._arrived[sequence.key])
        self._arrived[sequence.key] += 1
        self._arrivals += 1
        if not sequence.background:
            self._arrive(sequence.key)
        self.sequences[log.id] = sequence
        self._alive[sequence.key] += 1
        if leader is not None and leader.computed < leader.log.prompt_length:
            sequence.place = SequenceState.FOLLOWING
            leader.followers.append(sequence)
        else:
            self._wait(sequence)
        return sequence

    def _arrive(self, key: FairnessKey) -> None:
        """A sequence that is not background arrives. With a second tenant comes the quota."""
        self._foreground += 1
        if not self._sharing:
            return
        only = self._only
        if self.quota is not None:
            self.quota.enter(key)
        elif only is None or only.name == key.tenant or only.left + RECENT_SECONDS < self._now:
            self._only = OneTenant(key.tenant, key.weight)
        else:
            self.quota = self._quota_of(only)
            self.quota.enter(key)

    def _quota_of(self, only: OneTenant) -> SlotQuota:
        """A quota that knows the tenant that was here without others until now."""
        quota = SlotQuota(self._layout.max_seqs, self._layout.max_batch_tokens)
        quota.tick(self._now)
        if only.left < math.inf:
            quota.remember(only)
        for sequence in self.sequences.values():
            if not sequence.background:
                quota.enter(sequence.key)
                if sequence.slot is not None:
                    quota.take_slot(sequence.key)
        return quota

    def _depart(self, key: FairnessKey) -> None:
        """A sequence that is not background has ended."""
        self._foreground -= 1
        if self.quota is not None:
            self.quota.leave(key)
        elif not self._foreground:
            self._only = OneTenant(key.tenant, key.weight, self._now)

    def tick(self, now: float) -> None:
        """See Scheduler."""
        self._now = now
        self.running.sessions.tick(now)
        if self.quota is not None:
            self.quota.tick(now)
            if not self.quota.several:
                self._only, self.quota = self.quota.last(), None

    def begin_step(self) -> None:
        """Call it once for each step that is planned."""
        waited = self.over_quota_tenants
        self.over_quota_tenants = []
        self.left_out = set()
        self._room_for = None
        claim = self._claim
        if claim is not None and (self.quota is None or claim.place is SequenceState.ENDED):
            claim = self._claim = None
        if self.quota is None:
            return
        self._set_claim(self.quota, claim)
        tenants = self.quota.tenants()
        self._row = self._times.row
        prompts = self.waiting.tokens.copy()
        for sequence in self.running.prefilling:
            if not sequence.background:
                # Not what is left: the end of a long prompt is no short one.
                prompts[sequence.key.tenant] += sequence.known - sequence.cached
        self.left_out = self.row_shares.left_out(
            self.running.decoding, tenants, prompts, all_wait=tenants.keys() <= {*waited}
        )
        limited = {sequence.key.tenant for sequence in self.left_out}
        # With one row and so many prompt tokens a step takes twice as long as without, or is not measured.
        few = self._times.room(1, LONGEST_FACTOR * self._times.of(1, 0)) or math.inf
        self.over_quota_tenants = self.quota.over_quota_tenants(prompts, limited, few)

    def _set_claim(self, quota: SlotQuota, sequence: LiveSequence | None) -> None:
        """It has a claim from now on."""
        self._claim, quota.claim = sequence, None
        if sequence is not None:
            pages = max(self.running.pages_for(sequence), len(sequence.pages))
            quota.claim = Claim(sequence.key.tenant, pages)

    def serve(self, sequence: LiveSequence, tokens: int, *, prompt: bool) -> None:
        """A sequence has so many tokens in the step that is being planned; negative: fewer than it had. Each
        counts as long as it takes, relative to one of a prompt."""
        if self.quota is not None and not sequence.background:
            self.quota.serve(sequence.key.tenant, tokens * (1.0 if prompt else self._row))

    def may_be_replanned_for(self) -> bool:
        """Whether a sequence waits that a plan which has not begun should have: the first of a tenant
        while others run, if there is a slot and memory for it, or another tenant has one to give."""
        if self.quota is None or not self.waiting.foreground:
            return False
        here = {sequence.key.tenant for sequence in self.running if not sequence.background}
        heads = (self.waiting.peek(of=(tenant,)) for tenant in self.waiting.tenants - here)
        return any(
            head is not None
            and (self.running.has_slot_for(head, 0) or self._giver_for(self.quota, head) is not None)
            for head in heads
        )

    def is_over_quota(self, sequence: LiveSequence) -> bool:
        """Whether its tenant is over quota."""
        return sequence.key.tenant in self.over_quota_tenants

    def admit(
        self, *, background: bool, over_quota: bool = True, of: str | None = None
    ) -> LiveSequence | None:
        """Give a slot to the sequence whose turn it is, among those of the tenant `of` if it is given. None
        if no sequence waits, or there is no slot for it.

        A long prompt that does not fit yet delays those behind it, but see `_next`. A sequence
        that was preempted for lack of memory is not overtaken by others of its kind on its way back. Without
        `background`, no background sequence is admitted, unless one was passed over for too long. Without
        `over_quota`, no sequence of a tenant over quota is admitted either, unless sequences of other tenants
        wait behind it. Input is charged once, at the first admission, without the tokens from the prefix
        cache.
        """
        while (sequence := self._next(of)) is not None:
            if self._tier is None or not self._begin_fetch(self._tier, sequence):
                break
        if sequence is None:
            return None
        if self.returning and (
            sequence.background or not all(s.background or s.was_preempted for s in self.returning)
        ):
            return None
        if sequence.background and not (background or self.waiting.foreground):
            return None
        if not over_quota and self.waiting.tenants <= {*self.over_quota_tenants}:
            return None
        moves = len(self.running.moves)
        if not self.running.take_slot(sequence):
            return None
        fetched = sum(isinstance(move, FetchPage) for move in self.running.moves[moves:])
        sequence.settled = sequence.background and self.waiting.foreground > 0
        sequence.was_preempted = False
        if self.quota is not None and not sequence.background:
            self.quota.take_slot(sequence.key)
        self.waiting.remove(sequence)
        if not sequence.charged:
            sequence.charged = True
            self.policy.charge(sequence.key, sequence.known - sequence.computed, 0)
            if sequence.reads_cache:
                self.counters.prefix_queries += sequence.known
                self.counters.prefix_hits += sequence.computed
                self.counters.tier_hits += fetched * self._layout.page_size
        return sequence

    def _next(self, of: str | None = None) -> LiveSequence | None:
        """The sequence whose turn it is, of the tenant `of` if it is given; None if none waits.

        One for which there is no room is passed over if its tenant would have more than its share of the
        slots or the memory with it, and others wait who would not. It waits for its own tenant's sequences to
        end, which may take long. Those that would take the memory of a claim wait until it is admitted.
        """
        given = self._room_for
        if given is not None and given.place is SequenceState.WAITING and of in (None, given.key.tenant):
            return given
        head = self.waiting.peek(self.over_quota_tenants, None if of is None else (of,))
        quota, claim = self.quota, self._waiting_claim
        if quota is None or head is None or head.background:
            return head
        if claim in (None, head) and (of is not None or self.running.has_slot_for(head, 0)):
            return head
        if len(tenants := self.waiting.tenants) < 2:
            return head
        held = self.running.pages_by_tenant()
        if claim is not None:
            tenants.remove(claim.key.tenant)
        within = [tenant for tenant in tenants if self._stays_within_share(quota, tenant, held)]
        if head.key.tenant in within:
            return head
        if of is not None:
            return None
        return self.waiting.peek(self.over_quota_tenants, within) if within else claim or head

    @property
    def _waiting_claim(self) -> LiveSequence | None:
        """The sequence with a claim, if it waits to be admitted."""
        waits = self._claim is not None and self._claim.place is SequenceState.WAITING
        return self._claim if waits else None

    def _stays_within_share(self, quota: SlotQuota, tenant: str, held: Counter[str]) -> bool:
        """Whether a tenant does with its next sequence."""
        head = self.waiting.peek(of=(tenant,))
        assert head is not None
        running = self.running
        return quota.stays_within_share(tenant, held, running.pages, running.pages_for(head))

    def preempt_background(self, last_step: int | None) -> None:
        """Preempt background sequences for the others that wait, if it is these others' turn."""
        head = self.waiting.peek(self.over_quota_tenants)
        if head is None or head.background:
            return
        while not self.running.has_slot_for(head, self.waiting.foreground - 1):
            preempted = self.running.displaceable()
            if preempted is None:
                return
            self.preempt(preempted, last_step)

    def _giver_for(self, quota: SlotQuota, head: LiveSequence) -> str | None:
        """The tenant that must give up a slot or memory for this waiting sequence; None if none must."""
        running = self.running
        if head.background or running.has_slot_for(head, 0):
            return None
        if not running.has_slot:
            return quota.giver_for(head.key.tenant)
        needed = running.pages_for(head)
        return quota.giver_of_pages(running.pages_by_tenant(), running.pages, head.key.tenant, needed)

    def share_out(self, last_step: int | None, kept: Collection[LiveSequence] = ()) -> None:
        """If there is no slot or no memory for the sequence whose turn it is, or no memory for the running
        ones of a tenant within its share, a tenant with more than its share may give some up: for one that
        waits as many as it needs, for running ones one in a step. Not those of `kept` sequences."""
        running, quota = self.running, self.quota
        if quota is None:
            return
        head = self._next()
        if self._claim is None and head is not None and not head.background:
            needed = running.pages_for(head)
            if not running.has_slot_for(head, 0) and quota.exceeds_share(
                head.key.tenant, running.pages, needed
            ):
                self._set_claim(quota, head)
        if (claim := self._waiting_claim) is not None and self._share_out_for_claim(
            quota, claim, last_step, kept
        ):
            return
        if head is claim:
            head = None
        if head is not None and (giver := self._giver_for(quota, head)) is not None:
            self._room_for = head
            while giver is not None and self._gives_up(giver, head, last_step, kept):
                giver = self._giver_for(quota, head)
        elif (region := running.short_region()) is not None and region.sequences > 1:
            last = running.last(region)
            giver = quota.giver_of_pages(running.pages_by_tenant(), running.pages)
            # Otherwise the last one is preempted if a page is missing.
            if giver is not None and not last.background and last.key.tenant != giver:
                self._gives_up(giver, head, last_step, kept, region)

    def _share_out_for_claim(
        self,
        quota: SlotQuota,
        claim: LiveSequence,
        last_step: int | None,
        kept: Collection[LiveSequence],
    ) -> bool:
        """Have others give up what a sequence with a claim needs. Returns whether it has room now."""
        running = self.running
        while not running.has_slot_for(claim, 0):
            if running.has_slot:
                missing = running.pages_for(claim) - running.room
                giver = quota.giver_for_claim(running.pages_by_tenant(), running.pages, missing)
            else:
                giver = quota.giver_for(claim.key.tenant)
            if giver is None or not self._gives_up(giver, claim, last_step, kept):
                return False
        self._room_for = claim
        return True

    def _gives_up(
        self,
        giver: str,
        head: LiveSequence | None,
        last_step: int | None,
        kept: Collection[LiveSequence],
        region: Region | None = None,
    ) -> bool:
        """Preempt the sequence that a tenant admitted last, or last in a region, for the one that waits.
        False if it stays."""
        sequence = self.running.last_of(giver, region)
        gives_up_for = None if head is None else head.id, 0 if sequence is None else len(sequence.tokens)
        # Once for the same one: it came back before that one, and would for ever.
        if sequence is None or sequence in kept or sequence.gave_up_for == gives_up_for:
            return False
        sequence.was_preempted = True
        sequence.gave_up_for = gives_up_for
        self.preempt(sequence, last_step)
        return True

    def preempt(self, sequence: LiveSequence, last_step: int | None) -> None:
        """Move a sequence from its slot back to the head of its queue, after `last_step`, if any, is
        committed."""
        self.counters.preemptions += 1
        if self.quota is not None and not sequence.background:
            self.quota.leave_slot(sequence.key)
        self.running.give_up_slot(sequence, keep=True)
        if last_step is None:
            self._wait(sequence)
        else:
            sequence.place = SequenceState.RETURNING
            self.returning[sequence] = last_step

    def committed(self, step: int) -> None:
        """Preempted sequences without a row after `step` may be admitted again."""
        for sequence in [s for s, last_step in self.returning.items() if last_step <= step]:
            del self.returning[sequence]
            self._wait(sequence)

    def release_followers(self, leader: LiveSequence) -> None:
        """The leader's prompt is computed, or the leader is gone: its followers need not wait for it."""
        followers, leader.followers = leader.followers, []
        for sequence in followers:
            self._wait(sequence)

    def end(self, sequence: LiveSequence, *, keep: bool = True) -> None:
        """End a sequence, in any state. Without `keep`, and if its session is forgotten, its computed pages
        do not stay in the prefix cache."""
        keep = keep and not sequence.forgotten
        match sequence.place:
            case SequenceState.RUNNING:
                if self.quota is not None and not sequence.background:
                    self.quota.leave_slot(sequence.key)
                if keep and not sequence.log.prefill:  # its answer goes on elsewhere
                    self.running.keep_session(sequence)
                self.running.give_up_slot(sequence, keep=keep)
            case SequenceState.WAITING:
                self.waiting.remove(sequence)
            case SequenceState.RETURNING:
                del self.returning[sequence]
            case SequenceState.FETCHING:
                assert sequence.staged is not None
                del self.fetching[sequence.staged.ticket]
            case SequenceState.FOLLOWING:
                assert sequence.log.after is not None
                self.sequences[sequence.log.after].followers.remove(sequence)
            case SequenceState.ENDED:
                raise AssertionError(f"sequence {sequence.id} ends twice")
        if sequence.staged is not None and self._tier is not None:
            self._tier.discard(sequence.staged.ticket)
        sequence.place = SequenceState.ENDED
        del self.sequences[sequence.id]
        self.release_followers(sequence)
        self._alive[sequence.key] -= 1
        if not sequence.background:
            self._depart(sequence.key)
        if not self._alive[sequence.key]:
            del self._alive[sequence.key], self._arrived[sequence.key]
            self.policy.forget(sequence.key)

    def of_session(self, tenant: str, session: str) -> list[LiveSequence]:
        """The sequences of a tenant's session."""
        return [s for s in self.sequences.values() if s.log.session == session and s.log.tenant == tenant]

    def fail(self, sequence: LiveSequence, reason: str | None = None) -> None:
        """End a sequence with an error that no result contains. By default: it needs more memory than there
        is."""
        memory = self._layout.region_pages * self._layout.page_size
        error = reason or (
            f"a sequence of {len(sequence.tokens)} tokens cannot go on: "
            f"the context has {self._layout.max_model_len} tokens and KV memory has {memory}"
        )
        cached = sequence.cached_once()
        self.end(sequence)
        self.news[sequence.id] = Delta(sequence.id, finish="error", error=error, cached=cached)

    def adapters(self) -> tuple[set[str], set[str]]:
        """The digests of the adapters of running sequences, and of waiting ones."""
        running: set[str] = set()
        waiting: set[str] = set()
        for sequence in self.sequences.values():
            if sequence.log.adapter is not None:
                (waiting if sequence.slot is None else running).add(sequence.log.adapter)
        return running, waiting

    def check_integrity(self) -> None:
        """Raises AssertionError, which says what is inconsistent. Walks over everything."""
        places: dict[LiveSequence, SequenceState] = dict.fromkeys(self.running, SequenceState.RUNNING)
        listed = len(places)
        for sequences, place in (
            (self.waiting, SequenceState.WAITING),
            (self.returning, SequenceState.RETURNING),
            (self.fetching.values(), SequenceState.FETCHING),
            ([f for s in self.sequences.values() for f in s.followers], SequenceState.FOLLOWING),
        ):
            for sequence in sequences:
                places[sequence] = place
                listed += 1
        assert listed == len(places) == len(self.sequences), (
            f"{len(self.sequences)} sequences, {len(places)} of them in {listed} places"
        )
        for s, place in places.items():
            assert self.sequences.get(s.id) is s, f"sequence {s.id} outlives its end"
            assert s.place is place, f"sequence {s.id} is {s.place.name} and listed as {place.name}"
            if place is not SequenceState.RUNNING:
                assert s.slot is None, f"sequence {s.id} has slot {s.slot} while {place.name}"
                assert not s.pages, f"sequence {s.id} holds pages {s.pages} while {place.name}"
                assert s.handle is None, f"sequence {s.id} holds a cache handle while {place.name}"
                assert not s.planned | s.computed, f"sequence {s.id} counts pages it has dropped"
        assert self._alive == Counter(s.key for s in places), "a key outlives its sequences, or the reverse"
        tenants = Counter(s.key.tenant for s in places if not s.background)
        assert self._foreground == tenants.total(), "the count of sequences is wrong"
        if self.quota is not None:
            with_slot = Counter(s.key.tenant for s in self.running if not s.background)
            self.quota.check_integrity(tenants, with_slot)
        else:
            assert not self._sharing or len(tenants) < 2, f"no quota for {sorted(tenants)}"
        self.running.check_integrity()
        pages = self.running.pages_used
        assert places or self.running.holds or not pages, (
            f"idle, and {pages} pages are neither free nor cached"
        )

    def fetched(self, ticket: int, count: int) -> None:
        """A tier has staged the first `count` pages of a fetch: its sequence may be admitted."""
        sequence = self.fetching.pop(ticket, None)
        if sequence is None:
            return  # it has ended, or is computed
        assert sequence.staged is not None
        sequence.staged = sequence.staged._replace(end=sequence.staged.first + count)
        self._requeue(sequence)

    def abandon_fetch(self, ticket: int) -> None:
        """A tier takes too long: the sequence of that fetch is computed, if it still waits."""
        sequence = self.fetching.pop(ticket, None)
        if sequence is None:
            return
        assert self._tier is not None
        self._tier.discard(ticket)
        sequence.staged = None
        self._requeue(sequence)

    def _requeue(self, sequence: LiveSequence) -> None:
        sequence.place = SequenceState.WAITING
        self.waiting.push(sequence)

    def _begin_fetch(self, tier: TierIndex, sequence: LiveSequence) -> bool:
        """Have a tier fetch pages of a waiting sequence, if it has any and computing them is estimated to
        take longer. True if the sequence waits for them now."""
        if sequence.tried_tier or not sequence.reads_cache:
            return False
        first, keys = self.running.missing(sequence)
        if not keys:
            return False
        seconds = tier.seconds(len(keys))
        if seconds is None:
            return False
        computing = len(keys) * self._layout.page_size * self._times.each
        sequence.tried_tier = True
        if 0 < computing <= seconds:
            return False
        ticket = tier.reserve(len(keys))
        sequence.staged = StagedPages(ticket, first, first + len(keys))
        self.waiting.remove(sequence)
        sequence.place = SequenceState.FETCHING
        self.fetching[ticket] = sequence
        patience = max(computing, LONGEST_FETCHES[computing == 0])
        before = tuple(sequence.keys[:first])
        self.fetches.append(PageFetch(ticket, before, tuple(keys), patience, sequence.log.pages_at))
        return True

    def _wait(self, sequence: LiveSequence) -> None:
        """Add the sequence to the waiting queue, or end it if it cannot run or is complete."""
        sequence.tried_tier = False
        sequence.place = SequenceState.WAITING
        self.waiting.push(sequence)
        prompt_length, layout = sequence.log.prompt_length, self._layout
        if not 0 < prompt_length <= len(sequence.tokens):
            self.fail(sequence, "the prompt is empty")
        elif prompt_length >= layout.max_model_len:
            self.fail(sequence)
        elif len(sequence.tokens) > prompt_length and (finish := sequence.ending()) is not None:
            # The log is complete: the delta that ended it was lost with an earlier engine core.
            stop = sequence.tokens[-1] if finish == "stop" else None
            self.end(sequence)
            self.news[sequence.id] = Delta(sequence.id, finish=finish, stop_token=stop, cached=0)
        elif len(sequence.tokens) > layout.region_pages * layout.page_size:
            self.fail(sequence)
        elif self._tier is not None:
            self._begin_fetch(self._tier, sequence)
