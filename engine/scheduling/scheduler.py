"""Who computes what in the next step. Pure decisions: no tensor, no clock, nothing awaited.

One token budget for everything. Each plan gives rows to decoding sequences first, one token each, then to
prompts that have begun, in chunks, then to sequences that the fairness policy admits. A sequence gets all
pages for its log when it is admitted, so only decode rows can find the memory full. Then the sequence
admitted last drops its pages and waits again with its log; what it had computed stays in the prefix cache
for as long as there is room. Background sequences come last everywhere and are the first to go
(`background.py`): "admitted last" below means last by rank.

A decode row may have drafts (`speculation/`), of the tokens that are left when each sequence has one, and in
pages that nobody has to leave for. They count as planned until the result says how many were right.

Why lookahead is safe
---------------------
`plan` may be called again before earlier plans are committed, any number of times. The executor runs plans
strictly in order; at the start of a plan it applies the releases, then admissions, then copies; then come
the rows. So "earlier" and "later" below mean the order of plans, whenever their results are read.

*A row whose input is not known yet.* A decode row says "position p", and the token there is what this slot
sampled in the plan before. Whether that token ends the sequence by its place is known without seeing it: no
row is planned whose token would lie beyond `max_tokens` or `max_model_len`. What only the token itself can
tell is a stop.

*A sequence that ends while it has rows in flight* (a stop token, a failure, a cancel). It is ENDED at once
and its pages and slot are free at once, although plans F1..Fk in flight still write to them. Whoever gets
such a page gets it in a plan G made now, after all F. Each F has run before G starts. So the late writes
land before anything of G: before G's copies, and before its rows, and a row reads no position that its own
sequence, or the prefix it shares, has not written since. The slot is the same story: G carries the release,
in front of any admission to that slot, and every row of the old sequence lies in some F. Results of F for
an ENDED sequence are discarded.

*Pages in the prefix cache are never written.* A page is published by the commit of the step that filled it,
with tokens that are all committed. A running sequence writes at `planned` or above, and published pages lie
below `computed`, at or below `planned`. Rows that are discarded are no exception: they lie at or above
`computed`, hence in pages that were not published. So what a later plan shares or copies is what it looked
like at publication, unless it was evicted; and evicted pages are out of the trie before they are given
away.

*Copies of one plan do not depend on each other.* A source stays pinned until the plan is made, so it is not
among the pages that the same plan gives out; and destinations are private pages, never sources. Any order
will do.

*Preemption keeps what is in flight.* The tokens of rows in flight are right, although the pages are gone:
they are committed as usual and join the log. Only then (RETURNING becomes WAITING) may the sequence be
admitted again, so that the admission's log is complete and no row of an old admission is ever taken for one
of the new. Victims have no row in the plan at hand: decode rows are planned in order of rank and the last
by rank goes first; those that give way to others who wait go before any row is planned.

*A row that sits out* (its grammar's mask is not made yet) brings no token, and its sequence no further row
until `resume`: it keeps its slot and pages, and the position is computed again. Rows of it that were planned
by then have no input; they sit out too, and what they wrote lies at or above `computed`, as above.

*It always goes on.* A tenant that gives seats keeps its share of them, and the oldest of its sequences. The
sequence first by rank is never a victim of another that runs. It fails only when it is alone, needs a page,
nothing can be evicted and its last token is known, so the outcome does not depend on the depth of lookahead.
If it holds pages twice by then, its own and those of who computed the same first, it comes back for these.
With `max_batch_tokens` at least `max_seqs`, decode rows leave a token for every prompt that has begun.
"""

from collections import deque
from typing import NamedTuple

from personae.engine.plan import Admission, MemoryLayout, Row, StepPlan, StepResult
from personae.engine.scheduling.background import BackgroundAllowance, TokenBudget
from personae.engine.scheduling.fairness import FairnessPolicy
from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.output_processor import OutputProcessor
from personae.engine.scheduling.sequence_table import SequenceTable
from personae.engine.scheduling.step_time import StepTime
from personae.engine.sequence import Delta, SequenceLog

# as long as a step in which all seats decode: one in which tenants that crowd have prompts
OVER_QUOTA_FACTOR = 1.5

_Chunks = list[tuple[LiveSequence, Row]]


class _InFlightBatch(NamedTuple):
    """A plan whose result is not here yet: whose its rows are, decode rows first, then chunks. `drafting` of
    the chunks are decode rows, too, that may have drafts."""

    step: int
    decoding: list[LiveSequence]
    chunks: _Chunks
    drafting: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Decode rows, and tokens of chunks that are none."""
        prompts = sum(row.count for _, row in self.chunks) - self.drafting
        return len(self.decoding) + self.drafting, prompts


class Scheduler:
    """Takes logs, makes plans, turns results into deltas.

    `background` is the tokens of a step that background sequences may have beside others; None chooses. With
    `sharing` a tenant that holds more than its share of the seats gives some to others (`shares.py`).
    `drafts` is how many a decode row may have.

    Every sequence that was added ends exactly once: by a delta with `finish`, or by `cancel`.
    Raises ValueError when the layout cannot work.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        policy: FairnessPolicy,
        background: int | None = None,
        *,
        sharing: bool = False,
        drafts: int = 0,
    ) -> None:
        if min(layout.num_pages, layout.page_size, layout.max_seqs, layout.max_model_len) < 1:
            raise ValueError(f"every size of the memory layout must be at least 1: {layout}")
        if layout.max_batch_tokens < layout.max_seqs:
            raise ValueError(
                f"max_batch_tokens ({layout.max_batch_tokens}) must be at least max_seqs ({layout.max_seqs}) "
                "or a running sequence is left out of a step"
            )
        if layout.lendable > max(layout.num_pages - -(-layout.max_model_len // layout.page_size), 0):
            raise ValueError(f"what is not lent must hold one sequence of {layout.max_model_len} tokens")
        if layout.lendable and (layout.num_pages % layout.run or layout.lendable % layout.run):
            raise ValueError(f"pages that are lent must be whole runs of {layout.run}")
        self.layout = layout
        self._policy = policy
        self._drafts = drafts
        self._drafting = 0  # rows of the plan that is being made that may have drafts
        self._sequences = SequenceTable(layout, policy, sharing=sharing)
        self.counters = self._sequences.counters
        self._running = self._sequences.running
        self._outputs = OutputProcessor(policy, self._sequences, self._rows_in_flight)
        self._times = StepTime()
        self._allowance = BackgroundAllowance(layout.max_batch_tokens, background, cost=self._times.decoding)
        self._in_flight_batches: deque[_InFlightBatch] = deque()
        self._next_step = 0
        self._held_back = False  # in the last step, prompts of tenants that crowd

    def add(self, log: SequenceLog, *, speculates: bool = False) -> None:
        """Take a sequence in. One that cannot be served at all ends with the next commit. `speculates`: its
        rows may have drafts.

        Raises ValueError when a sequence of this id is already here.
        """
        sequence = self._sequences.enter(log)
        sequence.drafts = self._drafts if speculates else 0

    def cancel(self, id: str) -> bool:
        """End a sequence now, in whatever state. Nothing more of it is delivered. False if it has ended."""
        if self._sequences.news.pop(id, None) is not None:
            return True
        sequence = self._sequences.sequences.get(id)
        if sequence is None:
            return False
        self._sequences.end(sequence)
        return True

    def resume(self, id: str) -> None:
        """The mask that a sequence has sat out for is there: it is planned again. Nothing if it does not."""
        sequence = self._sequences.sequences.get(id)
        if sequence is not None and sequence.parked:
            self._running.unpark(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, None when there is nothing to do before another commit.

        A plan without rows is made when nothing is in flight and there are slots to release or endings to
        tell; it wants a result like any other.
        """
        rows: list[Row] = []
        chunks: _Chunks = []
        admissions: list[Admission] = []
        table, sequences = self._running, self._sequences
        table.short = 0
        sequences.begin_step()
        if table.background and sequences.waiting.foreground:
            sequences.preempt_background(
                self._in_flight_batches[-1].step if self._in_flight_batches else None
            )
        if sequences.waiting.foreground:
            sequences.share_out(self._in_flight_batches[-1].step if self._in_flight_batches else None)
        others, beside = sequences.foreground, len(table) - table.background
        budget = TokenBudget(self.layout.max_batch_tokens, self._allowance.of(others, beside))
        decoding = self._plan_decodes(rows, chunks, budget)
        begun = table.prefilling.copy()
        if sequences.over_quota_tenants:
            kept = min(self.layout.page_size, budget.tokens) if self._held_back else 0
            left = budget.tokens = budget.tokens - kept
            budget.over_quota = 0
            self._plan_prompts(
                [s for s in begun if not sequences.is_over_quota(s)], budget, rows, chunks, admissions
            )
            budget.over_quota = self._over_quota_tokens(len(decoding), left - budget.tokens)
            budget.tokens += kept
            begun = [s for s in begun if sequences.is_over_quota(s)]
        self._plan_prompts(begun, budget, rows, chunks, admissions)
        if not rows and (self._in_flight_batches or not (table.releases or sequences.news)):
            return None
        step = self._next_step
        plan = StepPlan(
            step,
            tuple(rows),
            tuple(admissions),
            tuple(table.releases),
            tuple(table.copies),
            tuple(table.reclaimed),
        )
        self._in_flight_batches.append(_InFlightBatch(step, decoding, chunks, self._drafting))
        self._next_step = step + 1
        self._allowance.stepped(others, beside, budget.spent)
        table.clear_changes()
        return plan

    def expected(self) -> float:
        """Seconds that the last plan will take, going by what steps took; 0 when that is not known."""
        if not self._in_flight_batches:
            return 0.0
        flight = self._in_flight_batches[-1]
        return self._times.of(*flight.size) if flight.decoding or flight.chunks else 0.0

    def lend(self, count: int) -> tuple[int, ...]:
        """Up to so many pages, rounded up to whole runs, whose memory adapters may have from now on; none
        while sequences want them.

        Plans in flight may still write to them: whoever takes the memory does so after them.
        """
        if self._running.short:
            return ()
        run = self.layout.run
        return self._running.lend(min(-(-count // run) * run, self.layout.lendable - len(self._running.lent)))

    def call_in(self) -> int:
        """How many of the pages that are lent the last plan was short of, and were not asked back yet."""
        return self._running.call_in()

    def take_back(self, pages: tuple[int, ...]) -> None:
        """Pages that were lent and are no longer used by adapters."""
        self._running.take_back(pages)

    @property
    def pages_lent(self) -> int:
        """Pages whose memory adapters have."""
        return len(self._running.lent)

    def commit(self, result: StepResult, seconds: float = 0.0) -> tuple[Delta, ...]:
        """Take the result of the oldest plan in flight; one delta for each sequence that has news.

        `seconds` is what the step took, if known: it tells how much of a step background sequences may have,
        and tenants that crowd.
        Raises ValueError for a result out of order or of the wrong size.
        """
        if not self._in_flight_batches or self._in_flight_batches[0].step != result.step:
            raise ValueError(f"the result of step {result.step} is out of order")
        flight = self._in_flight_batches[0]
        decoding, chunks = flight.decoding, flight.chunks
        if len(result.tokens) != len(decoding) + len(chunks):
            raise ValueError(f"{len(result.tokens)} results for {len(decoding) + len(chunks)} rows")
        self._in_flight_batches.popleft()
        if seconds and not result.drafted:
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
        return tuple(deltas)

    def _rows_in_flight(self, sequence: LiveSequence) -> int:
        """How many plans in flight have a row of it."""
        return sum(
            sequence in flight.decoding or any(one is sequence for one, _ in flight.chunks)
            for flight in self._in_flight_batches
        )

    # Planning

    def _plan_decodes(self, rows: list[Row], chunks: _Chunks, budget: TokenBudget) -> list[LiveSequence]:
        """A row for each decoding sequence, by rank; background ones as far as the budget goes. One that has
        forced tokens has a chunk of them, of what the others leave when each has a token."""
        planned: list[LiveSequence] = []
        spare = budget.tokens - len(self._running)
        drafting: _Chunks = []
        # The list is only ever shortened at or behind the place where the loop stands.
        for sequence in self._running.decoding:
            position = sequence.planned
            if position >= sequence.last:
                continue  # the token that ends it is in flight
            ahead = len(sequence.tokens) - position
            count = 1 if ahead < 2 else 1 + min(ahead - 1, spare)
            if sequence.background:
                if not budget.background:
                    break
                count = min(count, budget.background)
            pages: tuple[int, ...] = ()
            if position + count > sequence.capacity:
                pages, count = self._grow(sequence, count)
                if not count:
                    continue
            assert sequence.slot is not None
            if sequence.drafts and ahead < 2 and (drafts := self._drafts_of(sequence, spare)):
                if position + 1 + drafts > sequence.capacity:
                    pages += self._running.grow(sequence)
                row = Row(sequence.slot, position, 1, True, pages, drafts)
                drafting.append((sequence, row))
                budget.spend(1 + drafts, background=sequence.background)
                spare -= drafts
                sequence.planned = position + 1 + drafts
                continue
            row = Row(sequence.slot, position, count, count >= ahead, pages)
            if ahead < 2:
                rows.append(row)
                planned.append(sequence)
            else:
                chunks.append((sequence, row))
                spare -= count - 1
            budget.spend(count, background=sequence.background)
            sequence.planned = position + count
        self._drafting = len(drafting)
        chunks[:0] = drafting
        rows += (row for _, row in chunks)
        return planned

    def _drafts_of(self, sequence: LiveSequence, spare: int) -> int:
        """How many drafts the next row of a sequence may have: of the tokens that are left, as far as its
        pages go, and one more if each running sequence has another to grow into."""
        position = sequence.planned + 1
        most = min(sequence.drafts, spare, sequence.last - position)
        if sequence.background:
            return 0
        if position + most > sequence.capacity and not self._running.has_pages_to_spare:
            most = sequence.capacity - position
        return max(min(most, sequence.capacity + self.layout.page_size - position), 0)

    def _grow(self, sequence: LiveSequence, count: int) -> tuple[tuple[int, ...], int]:
        """Pages for `count` more positions, and how many have room. None has if it had to go."""
        pages: list[int] = []
        while sequence.planned + count > sequence.capacity and self._make_room(sequence):
            pages += self._running.grow(sequence)
        return tuple(pages), min(count, sequence.capacity - sequence.planned)

    def _plan_prompts(
        self,
        begun: list[LiveSequence],
        budget: TokenBudget,
        rows: list[Row],
        chunks: _Chunks,
        admissions: list[Admission],
    ) -> None:
        """Chunks of prompts that have begun, then of those that begin, as far as the budget goes."""
        for sequence in begun:
            if budget.of(sequence, is_over_quota=self._sequences.is_over_quota(sequence)):
                self._plan_chunk(sequence, budget, (), rows, chunks)
        while budget.tokens:
            admitted = self._sequences.admit(
                background=budget.background > 0, over_quota=budget.over_quota > 0
            )
            if admitted is None:
                break
            assert admitted.slot is not None
            admissions.append(Admission(admitted.slot, admitted.log))
            self._plan_chunk(admitted, budget, tuple(admitted.pages), rows, chunks)

    def _over_quota_tokens(self, decoding: int, others: int) -> int:
        """The tokens of prompts that tenants that crowd may have in a step with so many decode rows, and so
        many tokens of prompts of others. None, for the sake of the others, but not in two steps running."""
        longest = OVER_QUOTA_FACTOR * self._times.of(self.layout.max_seqs, 0)
        room = min(self._times.room(decoding, longest), self.layout.max_batch_tokens) - others
        self._held_back = others > 0 and not self._held_back
        return max(int(room), 0 if self._held_back else self.layout.page_size)

    def _make_room(self, sequence: LiveSequence) -> bool:
        """See to it that a running sequence can have a page, at the cost of those admitted after it."""
        table = self._running
        while not table.can_grow():
            if self._drafts and table.reclaim(sequence):
                continue
            victim = table.last()
            if len(table) == 1 and sequence.planned > sequence.computed:
                return False  # its last token is in flight, and may end it
            if len(table) > 1 or sequence.doubled:
                self._sequences.preempt(
                    victim, self._in_flight_batches[-1].step if self._in_flight_batches else None
                )
            else:
                self._sequences.fail(sequence)
            if victim is sequence:
                return False
        return True

    def _plan_chunk(
        self,
        sequence: LiveSequence,
        budget: TokenBudget,
        pages: tuple[int, ...],
        rows: list[Row],
        chunks: _Chunks,
    ) -> None:
        """As much of its log as the budget allows; the last chunk samples."""
        assert sequence.slot is not None
        is_over_quota = self._sequences.is_over_quota(sequence)
        # Whoever has just been admitted has a row, and pages with it.
        most = max(budget.of(sequence, is_over_quota=is_over_quota), 1 if pages else 0)
        count = min(most, sequence.known - sequence.planned)
        samples = sequence.planned + count == sequence.known
        row = Row(sequence.slot, sequence.planned, count, samples, pages)
        rows.append(row)
        chunks.append((sequence, row))
        sequence.planned += count
        budget.spend(count, background=sequence.background, is_over_quota=is_over_quota)
        if samples:
            self._running.begin_decoding(sequence)

    # What it looks like from outside

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have none, for whatever reason."""
        return len(self._sequences.sequences) - len(self._running)

    @property
    def fairness_gap(self) -> float:
        """Between the most and the least served of those that wait, in weighted tokens."""
        return self._policy.gap()

    @property
    def in_flight(self) -> int:
        """Plans whose results have not been committed."""
        return len(self._in_flight_batches)

    @property
    def pages_used(self) -> int:
        """Pages that running sequences hold; cached ones that nobody reads do not count."""
        return self._running.pages_used

    def adapters(self) -> tuple[set[str], set[str]]:
        """Digests of the adapters of running sequences, and of waiting ones."""
        return self._sequences.adapters()

    def check_integrity(self) -> None:
        """Raises AssertionError that says where the books disagree. Costs a walk over everything."""
        self._sequences.check_integrity()
        assert not self._sequences.returning or self._in_flight_batches, (
            "a preempted sequence waits for no result"
        )
