"""The scheduler: which sequences compute what in the next step. Pure decisions: no tensor, no clock, no
await.

There is one token budget for everything. Each plan first gives one row to each decoding sequence, then chunks
to prompts that have begun, then chunks to sequences that the fairness policy admits. Prompts of tenants that
ask for more than their share come after all others, whether they have begun or not (`slot_quota.py`). Where
rows are costly, tenants with many have theirs in turn (`row_shares.py`).

Stages of a model compute several steps at the same time, so these have rows of different sequences
(`micro_batches`): only rows whose tokens are known, and only as many as leave some for the other steps.

A sequence gets all pages for its log when it is admitted, so only decode rows can find the memory full. Then
the sequence admitted last is preempted: it drops its pages and waits again with its log. Its computed pages
stay in the prefix cache while there is room. Background sequences come last everywhere and are preempted
first (`background.py`); "admitted last" means last by rank.

A decode row may have drafts (`speculation/`), from the tokens that are left after each sequence has one, and
in pages for which nothing has to be preempted. Drafts count as planned until the result says how many were
right.

`plan` may be called again before earlier plans are committed; `__init__.py` explains why that is safe.
`replan` makes the last plan again if its step has not begun.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from personae.engine.plan import MemoryLayout, Row, StepPlan, StepResult
from personae.engine.scheduling.background import BackgroundAllowance
from personae.engine.scheduling.fairness import FairnessPolicy
from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.page_ledger import PageLedger
from personae.engine.scheduling.prefix import CacheObserver, PageNode
from personae.engine.scheduling.running import HeldPages
from personae.engine.scheduling.sequence_table import SequenceTable
from personae.engine.scheduling.step_rows import Chunks, KeptRows, OutputProcessor, StepBuilder, TokenBudget
from personae.engine.scheduling.step_time import FEWEST_TOKENS, StepTime
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats
from personae.engine.tiers.tier import PageFetch, TierIndex

# The longest step with prompts of tenants over quota, relative to a step in which all slots decode.
OVER_QUOTA_FACTOR = 1.5

STORED_A_STEP = 2  # pages that a step with rows gives to the tier, besides those it evicts
STORED_IDLE = 16

MICRO_BATCH = 16  # rows: steps with fewer take hardly less time


class _InFlightBatch(NamedTuple):
    """A plan whose result is not committed: the sequences of its rows, decode rows first, then chunks. The
    first `drafting` chunks are decode rows that may have drafts."""

    plan: StepPlan
    decoding: list[LiveSequence]
    chunks: Chunks
    drafting: int
    size: tuple[int, int]  # decode rows, and the tokens of prompt chunks
    fetched: tuple[PageNode, ...]  # pages that get their content in this step
    sources: tuple[PageNode, ...]  # pages that it copies
    held_back: bool  # whether the step before delayed prompts of tenants over quota


class Scheduler:
    """Takes logs, makes plans, turns results into deltas.

    `background` is how many tokens of a step background sequences may have while others are present; None
    chooses. `background_policy` ranks them; without it `policy` does. With `sharing`, a tenant that holds
    more than its share of the slots gives some to others (`slot_quota.py`). `drafts` is how many drafts a
    decode row may have. `tier` keeps pages for which there is no room. With several `micro_batches` so many
    plans are in flight at the same time, and no sequence decodes in two of them. `ledger` gets
    what pages hold, for an engine after this one.

    Every sequence that was added ends exactly once: by a delta with `finish`, or by `cancel`. Raises
    ValueError if the layout cannot work.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        policy: FairnessPolicy,
        background: int | None = None,
        *,
        background_policy: FairnessPolicy | None = None,
        sharing: bool = False,
        drafts: int = 0,
        tier: TierIndex | None = None,
        micro_batches: int = 1,
        ledger: PageLedger | None = None,
    ) -> None:
        if min(layout.num_pages, layout.page_size, layout.max_seqs, layout.max_model_len) < 1:
            raise ValueError(f"every size of the memory layout must be at least 1: {layout}")
        if layout.max_batch_tokens < layout.max_seqs:
            raise ValueError(
                f"max_batch_tokens ({layout.max_batch_tokens}) must be at least max_seqs ({layout.max_seqs}) "
                "or a step would leave out a running sequence"
            )
        if layout.num_pages % layout.regions or (layout.regions > 1 and (layout.lendable or tier)):
            raise ValueError("regions have as many pages each, lend none, and have no tier")
        if ledger is not None and layout.regions > 1:
            raise ValueError("regions have no ledger")
        if layout.lendable > max(layout.num_pages - -(-layout.max_model_len // layout.page_size), 0):
            raise ValueError(f"the pages not lent must hold one sequence of {layout.max_model_len} tokens")
        if layout.lendable and (layout.num_pages % layout.run or layout.lendable % layout.run):
            raise ValueError(f"lent pages must be whole runs of {layout.run}")
        self.layout = layout
        self._drafts = drafts
        self._micro_batches = micro_batches
        self._times = StepTime()
        self._tier = tier
        self._ledger = ledger
        self._sequences = SequenceTable(
            layout,
            policy,
            background_policy,
            sharing=sharing,
            tier=tier,
            times=self._times,
            ledger=ledger,
        )
        self.counters = self._sequences.counters
        self._running = self._sequences.running
        self._outputs = OutputProcessor(self._sequences, self._rows_in_flight)
        self._allowance = BackgroundAllowance(layout.max_batch_tokens, background, cost=self._times.decoding)
        self._in_flight_batches: deque[_InFlightBatch] = deque()
        self._next_step = 0
        self._resting = False  # the last result's
        self._held_back = False  # whether the last step delayed prompts of tenants over quota

    def add(self, log: SequenceLog, *, speculates: bool = False) -> None:
        """Add a sequence. One that can never run ends with the next commit. `speculates`: its rows may have
        drafts.

        Raises ValueError if a sequence with this id exists.
        """
        sequence = self._sequences.enter(log)
        sequence.drafts = self._drafts if speculates else 0

    def cancel(self, id: str) -> bool:
        """End a sequence now, in any state. Nothing more of it is delivered. False if it has ended
        already."""
        if self._sequences.news.pop(id, None) is not None:
            return True
        sequence = self._sequences.sequences.get(id)
        if sequence is None:
            return False
        self._sequences.end(sequence)
        return True

    def resume(self, id: str) -> None:
        """The mask of a deferred sequence is ready, so it is planned again. Does nothing if it is not
        deferred."""
        sequence = self._sequences.sequences.get(id)
        if sequence is not None and sequence.parked:
            self._running.unpark(sequence)

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before another commit.

        A plan without rows is made if nothing is in flight and there are slots to release or endings to
        deliver. It needs a result like any other.
        """
        table, sequences = self._running, self._sequences
        table.short = 0
        sequences.begin_step()
        last = self._in_flight_batches[-1].plan.step if self._in_flight_batches else None
        if table.background and sequences.waiting.foreground:
            sequences.preempt_background(last)
        if sequences.quota is not None:
            sequences.share_out(last)
        running = len(table) - table.background
        others = running > 0 or sequences.waiting.foreground > 0
        background = table.background or sequences.waiting.background
        allowed = self._allowance.of(others, running) if background else 0
        budget = TokenBudget(self.layout.max_batch_tokens, allowed)
        builder = StepBuilder(self.layout, sequences, budget, self._drafts, last, resting=self._resting)
        held_back = self._held_back
        rows = self._add_rows(builder, budget)
        if self._tier is not None and self._tier.stores and (rows or not self._in_flight_batches):
            table.store_idle(STORED_A_STEP if rows else STORED_IDLE)
        if not rows and (self._in_flight_batches or not (table.releases or sequences.news or table.moves)):
            return None
        plan = self._finish_plan(builder, StepPlan(self._next_step, ()), held_back)
        self._next_step += 1
        if background:
            self._allowance.stepped(others, running, budget.spent)
        else:
            self._allowance.alone = 0 if others else self._allowance.alone + 1
        return plan

    def replan(self) -> StepPlan | None:
        """Make the last plan again, if that lets in a tenant's first sequence, which came after it. Call it
        only while the step of that plan has not begun. Returns the plan that replaces it; None: it stays.

        What the plan admits stays admitted, and decode rows that bring pages stay. All other rows are chosen
        again. At most one sequence is preempted, for the one that came. Once a sequence has ended that has a
        row in the plan, the plan stays: that row writes to memory which only later plans may give away.
        """
        table, sequences = self._running, self._sequences
        last = self._in_flight_batches[-1] if self._in_flight_batches else None
        if last is None or last.plan.moves or table.releases or not sequences.may_be_replanned_for():
            return None
        if not table.pin_again(last.sources):
            return None
        self._in_flight_batches.pop()
        kept = self._take_back(last)
        self._held_back = last.held_back
        sequences.row_shares.take_back()
        table.short = 0
        sequences.begin_step()
        before = self._in_flight_batches[-1].plan.step if self._in_flight_batches else None
        sequences.share_out(before, {sequence for rows in kept for sequence, _ in rows})
        budget = TokenBudget(self.layout.max_batch_tokens, 0)
        builder = StepBuilder(
            self.layout, sequences, budget, self._drafts, before, resting=self._resting, kept=kept
        )
        self._add_rows(builder, budget, kept)
        return self._finish_plan(builder, last.plan, last.held_back)

    def _take_back(self, batch: _InFlightBatch) -> KeptRows:
        """Take a plan's rows back. Returns those that stay."""
        kept = KeptRows([], [], [], [])
        rows = [*zip(batch.decoding, batch.plan.rows, strict=False), *batch.chunks]
        drafting = len(batch.decoding) + batch.drafting
        for number, (sequence, row) in enumerate(rows):
            is_prompt = number >= drafting and row.start < sequence.known
            taken = is_prompt or (number < len(batch.decoding) and not (row.pages or sequence.drafts))
            if taken and not (sequence.parked or sequence.stale or sequence.background):
                self._sequences.serve(sequence, -row.count, prompt=is_prompt)
                self._running.unplan(sequence, row.count)
                if row.pages:
                    kept.admitted.append((sequence, row))
            else:
                place = 0 if number < len(batch.decoding) else 1 if number < drafting else 2
                kept[place].append((sequence, row))
        return kept

    def _add_rows(self, builder: StepBuilder, budget: TokenBudget, kept: KeptRows | None = None) -> list[Row]:
        """Rows for all that may have some, after what is kept of a plan that is made again."""
        sequences, waiting = self._sequences, self._sequences.waiting
        builder.add_decodes(None if self._micro_batches == 1 else self._micro_batch())
        if sequences.quota is not None:
            builder.charge_decodes()
        if sequences.over_quota_tenants:
            budget.over_quota = 0
        if kept is not None:
            builder.add_admitted()
        some = self._running.prefilling or waiting.foreground or waiting.background
        if some or sequences.over_quota_tenants:
            self._add_prompts(builder, budget)
        return builder.rows

    def _micro_batch(self) -> int:
        """How many decode rows a plan may have."""
        rows = sum(sequence.planned < sequence.last for sequence in self._running.decoding)
        return max(math.ceil(rows / self._micro_batches), MICRO_BATCH)

    def _finish_plan(self, builder: StepBuilder, begun: StepPlan, held_back: bool) -> StepPlan:
        """The plan with the builder's rows, and with all changes: those of the plan `begun` come first."""
        table, chunks = self._running, builder.chunks
        prompts = sum([row.count for _, row in chunks]) - builder.drafting if chunks else 0
        plan = StepPlan(
            begun.step,
            tuple(builder.rows),
            (*begun.admissions, *builder.admissions),
            (*begun.releases, *table.releases),
            (*begun.copies, *table.copies),
            (*begun.reclaimed, *table.reclaimed),
            tuple(table.moves),
        )
        fetched, sources = table.clear_changes()
        batch = _InFlightBatch(
            plan,
            builder.decoding,
            chunks,
            builder.drafting,
            (len(builder.decoding) + builder.drafting, prompts),
            fetched,
            sources,
            held_back,
        )
        self._in_flight_batches.append(batch)
        return plan

    def _add_prompts(self, builder: StepBuilder, budget: TokenBudget) -> None:
        """Rows for prompts. Those of tenants over quota come last, within their limit."""
        sequences, begun = self._sequences, self._running.prefilling.copy()
        if sequences.over_quota_tenants:
            kept = min(self.layout.page_size, budget.tokens) if self._held_back else 0
            left = budget.tokens = budget.tokens - kept
            builder.add_prompts([s for s in begun if not sequences.is_over_quota(s)])
            budget.over_quota = self._over_quota_tokens(len(builder.decoding), left - budget.tokens)
            budget.tokens += kept
            for tenant in sequences.over_quota_tenants:
                theirs = [s for s in begun if s.key.tenant == tenant]
                builder.add_prompts(theirs, tenant)
            begun = []
        builder.add_prompts(begun)

    def expected(self) -> float:
        """The expected seconds of the last plan, from measured steps; 0 if unknown."""
        if not self._in_flight_batches:
            return 0.0
        flight = self._in_flight_batches[-1]
        return self._times.of(*flight.size) if flight.decoding or flight.chunks else 0.0

    def lend(self, count: int) -> tuple[int, ...]:
        """Lend adapters the memory of up to `count` pages, rounded up to whole runs. None while sequences
        need pages.

        Plans in flight may still write to these pages: the memory may be used only after these plans.
        """
        if self._running.short or not self.layout.lendable:
            return ()
        run = self.layout.run
        return self._running.lend(min(-(-count // run) * run, self.layout.lendable - len(self._running.lent)))

    def recall(self) -> int:
        """How many of the lent pages the last plan was missing and were not recalled yet."""
        return self._running.recall()

    def returned(self, pages: tuple[int, ...]) -> None:
        """Pages that were lent and that adapters no longer use."""
        self._running.returned(pages)

    @property
    def pages_lent(self) -> int:
        """Pages whose memory is lent to adapters."""
        return len(self._running.lent)

    def commit(self, result: StepResult, seconds: float = 0.0) -> tuple[Delta, ...]:
        """Apply the result of the oldest plan in flight. Returns one delta for each sequence with news.

        `seconds` is the step's time, if known. It decides how much of later steps background sequences and
        tenants over quota may have. Raises ValueError for a result out of order or of the wrong size.
        """
        if not self._in_flight_batches or self._in_flight_batches[0].plan.step != result.step:
            raise ValueError(f"the result of step {result.step} is out of order")
        flight = self._in_flight_batches[0]
        decoding, chunks = flight.decoding, flight.chunks
        if len(result.tokens) != len(decoding) + len(chunks):
            raise ValueError(f"{len(result.tokens)} results for {len(decoding) + len(chunks)} rows")
        self._in_flight_batches.popleft()
        self._running.unwritten.difference_update(flight.fetched)
        for node in flight.fetched:
            self._running.written(node)
        self._resting = result.resting
        if result.experts is not None:
            self.counters.count_experts(result.experts)
        if seconds and not result.drafted and not flight.plan.moves:
            self._times.observe(*flight.size, seconds)
        news, settle = self._sequences.news, self._outputs
        deltas = list(news.values())
        news.clear()
        if result.failures or result.logprobs or result.deferred:
            for index, sequence in enumerate(decoding):
                settle.row(sequence, index, None, result, deltas)
        else:
            settle.plain(decoding, result.tokens, deltas)
        for index, (sequence, row) in enumerate(chunks, len(decoding)):
            settle.row(sequence, index, row, result, deltas)
        if self._sequences.returning:
            self._sequences.committed(result.step)
        if self._ledger is not None:
            self._ledger.stepped()
            self._ledger.follow(decoding)
            self._ledger.follow([sequence for sequence, _ in chunks])
        return tuple(deltas)

    def take_fetches(self) -> list[PageFetch]:
        """The fetches that the tier is to begin now."""
        fetches, self._sequences.fetches = self._sequences.fetches, []
        return fetches

    def fetched(self, ticket: int, count: int) -> None:
        """The tier has staged the first `count` pages of a fetch."""
        self._sequences.fetched(ticket, count)

    def abandon_fetch(self, ticket: int) -> None:
        """A fetch takes longer than its patience: its pages are computed."""
        self._sequences.abandon_fetch(ticket)

    def hold(self, root: bytes, chunks: Sequence[bytes]) -> HeldPages:
        """Keep pages for another engine until `let_go`: those that the prefix cache has behind the root of
        this name, for as long as their tokens are these (`page_names.chunk_bytes`)."""
        return self._running.hold(root, chunks)

    def let_go(self, number: int) -> None:
        """Undo a `hold`."""
        self._running.let_go(number)

    def tick(self, now: float) -> None:
        """It is `now`, in seconds on any clock that only goes forward. By it sessions end, and the shares of
        tenants that left."""
        self._sequences.tick(now)

    def keep_session(self, tenant: str, session: str, seconds: float) -> None:
        """Keep the pages of a tenant's session for so long from now on, and from the end of its sequences on;
        0: no longer. Does nothing if it has none."""
        self._running.sessions.extend(tenant, session, seconds)
        for sequence in self._sequences.of_session(tenant, session):
            sequence.log = replace(sequence.log, session_seconds=seconds)

    def forget_session(self, tenant: str, session: str) -> None:
        """Keep nothing of a tenant's session. Its pages leave the cache, except those that others use. The
        tier deletes the pages that it has of it. Pages of sequences that run leave when these end."""
        for sequence in self._sequences.of_session(tenant, session):
            sequence.forgotten = True
        self._running.forget_session(tenant, session)

    @property
    def has_unstored(self) -> bool:
        """Whether a plan may still give pages to the tier, without any sequence."""
        return self._tier is not None and self._running.has_unstored

    def _rows_in_flight(self, sequence: LiveSequence) -> int:
        """How many plans in flight have a row of the sequence."""
        return sum(
            sequence in flight.decoding or any(one is sequence for one, _ in flight.chunks)
            for flight in self._in_flight_batches
        )

    def _over_quota_tokens(self, decoding: int, others: int) -> int:
        """The prompt tokens that tenants over quota may have in a step with `decoding` decode rows and
        `others` prompt tokens of other tenants. None, to keep the step short for the others or to measure it
        without prompts, but not in two steps in a row."""
        full, now = (self._times.of(rows, 0) for rows in (self.layout.max_seqs, max(decoding, 1)))
        shares = self._sequences.row_shares
        longest = min(OVER_QUOTA_FACTOR * full, shares.longest or shares.factor * now)
        room = min(self._times.room(decoding, longest), self.layout.max_batch_tokens) - others
        waits = shares.full and not self._held_back
        self._held_back = (others > 0 or (decoding > 0 and self._times.due)) and not self._held_back
        if self._held_back:
            return 0
        least = FEWEST_TOKENS if now else self.layout.page_size
        return max(int(room), 0 if waits else least)

    # Statistics

    def stats(self) -> SchedulerStats:
        """The load now, without what only the engine core knows, and without the counters."""
        table = self._running
        running = len(table)
        return SchedulerStats(
            running=running,
            waiting=len(self._sequences.sequences) - running,
            pages_total=self.layout.num_pages,
            pages_used=table.pages_used,
            pages_lent=len(table.lent),
            pages_kept=table.pages_kept,
            sessions=len(table.sessions),
            page_size=self.layout.page_size,
            prompt_token_seconds=self._times.each,
        )

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without a slot, for whatever reason."""
        return len(self._sequences.sequences) - len(self._running)

    @property
    def fairness_gap(self) -> float:
        """Between the most and the least served of the waiting keys, in weighted tokens."""
        return self._sequences.policy.gap()

    @property
    def in_flight(self) -> int:
        """Plans whose results are not committed."""
        return len(self._in_flight_batches)

    @property
    def pages_used(self) -> int:
        """Pages that running sequences hold. Cached pages without a reader do not count."""
        return self._running.pages_used

    @property
    def holds(self) -> int:
        """How often `hold` was called without `let_go`."""
        return len(self._running.holds)

    @property
    def sessions(self) -> int:
        """Sessions that keep pages."""
        return len(self._running.sessions)

    @property
    def pages_kept(self) -> int:
        """Pages that sessions keep."""
        return self._running.pages_kept

    def adapters(self) -> tuple[set[str], set[str]]:
        """The digests of the adapters of running sequences, and of waiting ones."""
        return self._sequences.adapters()

    def adopt(self) -> int:
        """Put into the prefix cache what the ledger says that another engine has left in the pages. Returns
        how many pages that is. Call it before anything else but `observe_cache`."""
        return self._running.adopt()

    def observe_cache(self, observer: CacheObserver) -> None:
        """Set the observer of the prefix cache."""
        self._running.observe_cache(observer)

    def check_integrity(self) -> None:
        """Raises AssertionError, which says what is inconsistent. Walks over everything."""
        self._sequences.check_integrity()
        assert not self._sequences.returning or self._in_flight_batches, (
            "a preempted sequence waits for no result"
        )
