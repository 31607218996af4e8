"""Who computes what in the next step. Pure decisions: no tensor, no clock, nothing awaited.

One token budget for everything. Each plan gives rows to decoding sequences first, one token each, then to prompts
that have begun, in chunks, then to sequences that the fairness policy admits. A sequence gets all pages for its log
when it is admitted, so only decode rows can find the memory full. Then the sequence admitted last drops its pages
and waits again with its log; what it had computed stays in the prefix cache for as long as there is room.

Why lookahead is safe
---------------------
`plan` may be called again before earlier plans are committed, any number of times. The executor runs plans strictly
in order; at the start of a plan it applies the releases, then admissions, then copies; then come the rows. So
"earlier" and "later" below mean the order of plans, whenever their results are read.

*A row whose input is not known yet.* A decode row says "position p", and the token there is what this slot sampled
in the plan before. Whether that token ends the sequence by its place is known without seeing it: no row is planned
whose token would lie beyond `max_tokens` or `max_model_len`. What only the token itself can tell is a stop.

*A sequence that ends while it has rows in flight* (a stop token, a failure, a cancel). It is ENDED at once and its
pages and slot are free at once, although plans F1..Fk in flight still write to them. Whoever gets such a page gets
it in a plan G made now, after all F. Each F has run before G starts. So the late writes land before anything of G:
before G's copies, and before its rows, and a row reads no position that its own sequence, or the prefix it shares,
has not written since. The slot is the same story: G carries the release, in front of any admission to that slot, and
every row of the old sequence lies in some F. Results of F for an ENDED sequence are discarded.

*Pages in the prefix cache are never written.* A page is published by the commit of the step that filled it, with
tokens that are all committed. A running sequence writes at `planned` or above, and published pages lie below
`computed`, at or below `planned`. Rows that are discarded are no exception: they lie at or above `computed`, hence in
pages that were not published. So what a later plan shares or copies is what it looked like at publication, unless
it was evicted; and evicted pages are out of the trie before they are given away.

*Copies of one plan do not depend on each other.* A source stays pinned until the plan is made, so it is not among
the pages that the same plan gives out; and destinations are private pages, never sources. Any order will do.

*Preemption keeps what is in flight.* The tokens of rows in flight are right, although the pages are gone: they are
committed as usual and join the log. Only then (RETURNING becomes WAITING) may the sequence be admitted again, so that
the admission's log is complete and no row of an old admission is ever taken for one of the new. Victims have no row
in the plan at hand: decode rows are planned in order of admission and the last admitted goes first.

*It always goes on.* The sequence admitted first is never a victim of another. It fails only when it is alone, needs a
page, nothing can be evicted and its last token is known, so the outcome does not depend on the depth of lookahead.
With `max_batch_tokens` at least `max_seqs`, decode rows leave a token for every prompt that has begun.
"""

from collections import Counter, deque
from typing import NamedTuple

from personae.engine.fairness import FairnessPolicy, Key
from personae.engine.live import LiveSequence, Place
from personae.engine.plan import Admission, MemoryLayout, Row, StepPlan, StepResult
from personae.engine.running import RunningTable
from personae.engine.sequence import Delta, SequenceLog, TokenLogprobs
from personae.engine.waiting import WaitingRoom

_Chunks = list[tuple[LiveSequence, Row]]


class _Flight(NamedTuple):
    """A plan whose result is not here yet: whose its rows are, decode rows first, then chunks."""

    step: int
    decoding: list[LiveSequence]
    chunks: _Chunks


class Scheduler:
    """Takes logs, makes plans, turns results into deltas.

    Every sequence that was added ends exactly once: by a delta with `finish`, or by `cancel`.
    Raises ValueError when the layout cannot work.
    """

    def __init__(self, layout: MemoryLayout, policy: FairnessPolicy) -> None:
        if min(layout.num_pages, layout.page_size, layout.max_seqs, layout.max_model_len) < 1:
            raise ValueError(f"every size of the memory layout must be at least 1: {layout}")
        if layout.max_batch_tokens < layout.max_seqs:
            raise ValueError(
                f"max_batch_tokens ({layout.max_batch_tokens}) must be at least max_seqs ({layout.max_seqs}): "
                "each running sequence may need a token of every step"
            )
        self._layout = layout
        self._policy = policy
        self._running = RunningTable(layout)
        self._waiting = WaitingRoom(policy)
        self._returning: dict[LiveSequence, int] = {}  # to the last step that has a row of it
        self._sequences: dict[str, LiveSequence] = {}  # all but the ended ones
        self._alive: Counter[Key] = Counter()
        self._flights: deque[_Flight] = deque()
        self._news: dict[str, Delta] = {}  # endings that no result brought, for the next commit
        self._next_step = 0
        self._arrivals = 0
        self._preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def add(self, log: SequenceLog) -> None:
        """Take a sequence in. One that cannot be served at all ends with the next commit.

        Raises ValueError when a sequence of this id is already here.
        """
        if log.id in self._sequences or log.id in self._news:
            raise ValueError(f"sequence {log.id!r} is already here")
        leader = None if log.after is None else self._sequences.get(log.after)
        sequence = LiveSequence(log, self._arrivals, self._layout)
        self._arrivals += 1
        self._sequences[log.id] = sequence
        self._alive[sequence.key] += 1
        if leader is not None and leader.computed < leader.log.prompt_length:
            sequence.place = Place.FOLLOWING
            leader.followers.append(sequence)
        else:
            self._wait(sequence)

    def cancel(self, id: str) -> bool:
        """End a sequence now, whatever state it is in. Nothing more of it is delivered. False if it has ended."""
        if self._news.pop(id, None) is not None:
            return True
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def plan(self) -> StepPlan | None:
        """The next step, None when there is nothing to do before another commit.

        A plan without rows is made when nothing is in flight and slots are to be released or an ending is to be
        told; it wants a result like any other.
        """
        rows: list[Row] = []
        chunks: _Chunks = []
        admissions: list[Admission] = []
        table, preemptions = self._running, self._preemptions
        decoding = self._plan_decodes(rows)
        budget = self._layout.max_batch_tokens - len(rows)
        for sequence in table.prefilling.copy():
            if not budget:
                break
            budget -= self._plan_chunk(sequence, budget, (), rows, chunks)
        if self._preemptions == preemptions:
            while budget and (admitted := self._admit()) is not None:
                assert admitted.slot is not None
                admissions.append(Admission(admitted.slot, admitted.log))
                budget -= self._plan_chunk(admitted, budget, tuple(admitted.pages), rows, chunks)
        if not rows and (self._flights or not (table.releases or self._news)):
            return None
        step = self._next_step
        plan = StepPlan(step, tuple(rows), tuple(admissions), tuple(table.releases), tuple(table.copies))
        self._flights.append(_Flight(step, decoding, chunks))
        self._next_step = step + 1
        table.clear_changes()
        return plan

    def commit(self, result: StepResult) -> tuple[Delta, ...]:
        """Take the result of the oldest plan in flight; one delta for each sequence that has news.

        Raises ValueError for a result out of order or of the wrong size.
        """
        if not self._flights or self._flights[0].step != result.step:
            raise ValueError(f"the result of step {result.step} is out of order")
        _, decoding, chunks = self._flights[0]
        if len(result.tokens) != len(decoding) + len(chunks):
            raise ValueError(f"{len(result.tokens)} results for {len(decoding) + len(chunks)} rows")
        self._flights.popleft()
        deltas = list(self._news.values())
        self._news.clear()
        if result.failures or result.logprobs:
            for index, sequence in enumerate(decoding):
                self._settle(sequence, index, None, result, deltas)
        else:
            self._settle_plain(decoding, result.tokens, deltas)
        for index, (sequence, row) in enumerate(chunks, len(decoding)):
            self._settle(sequence, index, row, result, deltas)
        if self._returning:
            for sequence in [s for s, step in self._returning.items() if step <= result.step]:
                del self._returning[sequence]
                self._wait(sequence)
        return tuple(deltas)

    # Planning

    def _plan_decodes(self, rows: list[Row]) -> list[LiveSequence]:
        """A row for each decoding sequence, oldest first."""
        planned: list[LiveSequence] = []
        for (
            sequence
        ) in self._running.decoding:  # only ever shortened at or behind the place where the loop stands
            position = sequence.planned
            if position >= sequence.last:
                continue  # the token that ends it is in flight
            pages: tuple[int, ...] = ()
            if position >= sequence.capacity:
                if not self._make_room(sequence):
                    continue
                pages = self._running.grow(sequence)
            assert sequence.slot is not None
            rows.append(Row(sequence.slot, position, 1, True, pages))
            planned.append(sequence)
            sequence.planned = position + 1
        return planned

    def _make_room(self, sequence: LiveSequence) -> bool:
        """See to it that a running sequence can have a page, at the cost of those admitted after it."""
        table = self._running
        while not table.can_grow():
            victim = table.last_admitted()
            if len(table) > 1:
                self._preempt(victim)
            elif sequence.planned == sequence.computed:
                self._fail(sequence, self._too_long(sequence))
            else:
                return False  # its last token is in flight, and may end it
            if victim is sequence:
                return False
        return True

    def _plan_chunk(
        self, sequence: LiveSequence, budget: int, pages: tuple[int, ...], rows: list[Row], chunks: _Chunks
    ) -> int:
        """As much of its log as the budget allows; the last chunk samples. Returns the tokens spent."""
        assert sequence.slot is not None
        count = min(budget, sequence.known - sequence.planned)
        samples = sequence.planned + count == sequence.known
        row = Row(sequence.slot, sequence.planned, count, samples, pages)
        rows.append(row)
        chunks.append((sequence, row))
        sequence.planned += count
        if samples:
            self._running.begin_decoding(sequence)
        return count

    def _admit(self) -> LiveSequence | None:
        """Seat whose turn it is; None when nobody waits or there is no seat.

        Nobody is passed over: a long prompt that does not fit yet holds back those behind it, not the reverse.
        """
        sequence = self._waiting.peek()
        if sequence is None or not self._running.seat(sequence):
            return None
        self._waiting.remove(sequence)
        if not sequence.told:
            sequence.cached = min(sequence.computed, sequence.log.prompt_length)
        if not sequence.charged:
            sequence.charged = True
            self._policy.charge(sequence.key, sequence.known - sequence.computed, 0)
            if sequence.reads_cache:
                self._prefix_queries += sequence.known
                self._prefix_hits += sequence.computed
        return sequence

    # Committing

    def _settle_plain(
        self, decoding: list[LiveSequence], tokens: tuple[int | None, ...], deltas: list[Delta]
    ) -> None:
        """What `_settle` does, for decode rows of a step without failures and logprobs: the usual case, and hot."""
        charge, running, ended = self._policy.charge, Place.RUNNING, Place.ENDED
        for sequence, token in zip(decoding, tokens, strict=False):
            place = sequence.place
            if place is ended:
                continue
            if place is running:
                sequence.computed += 1
                if sequence.computed >= sequence.publish_at:
                    self._running.publish(sequence)
            if token is None:
                raise ValueError(f"sequence {sequence.id!r} should have sampled a token")
            known = sequence.tokens
            known.append(token)
            charge(sequence.key, 0, 1)
            if token in sequence.stops or len(known) >= sequence.limit:
                deltas.append(self._tell(sequence, token))
            else:
                deltas.append(Delta(sequence.id, (token,)))

    def _settle(
        self, sequence: LiveSequence, index: int, row: Row | None, result: StepResult, deltas: list[Delta]
    ) -> None:
        """Bring one row's result home. `row` is given for chunks; a decode row is one position."""
        if sequence.place is Place.ENDED:
            return  # discarded
        failure = result.failures.get(index)
        if failure is not None:
            cached = self._cached_once(sequence)
            self._end(sequence, keep=False)
            deltas.append(Delta(sequence.id, finish="error", error=failure, cached=cached))
            return
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if row is not None and index in result.prompt_logprobs:
            # After a preemption the prompt is computed again; what was told is not told twice.
            prompt_logprobs = result.prompt_logprobs[index][
                max(sequence.prompt_logprobs_sent - row.start, 0) :
            ]
            sequence.prompt_logprobs_sent += len(prompt_logprobs)
        if sequence.place is Place.RUNNING:
            sequence.computed += 1 if row is None else row.count
            self._running.publish(sequence)
            if sequence.computed >= sequence.log.prompt_length:
                self._release_followers(sequence)
        if row is None or row.samples:
            token = result.tokens[index]
            if token is None:
                raise ValueError(f"sequence {sequence.id!r} should have sampled a token")
            sequence.tokens.append(token)
            self._policy.charge(sequence.key, 0, 1)
            logprobs = result.logprobs.get(index)
            deltas.append(
                self._tell(sequence, token, () if logprobs is None else (logprobs,), prompt_logprobs)
            )
        elif prompt_logprobs:
            deltas.append(
                Delta(sequence.id, prompt_logprobs=prompt_logprobs, cached=self._cached_once(sequence))
            )

    def _tell(
        self,
        sequence: LiveSequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> Delta:
        """The delta of a token just committed; ends the sequence if it was the last."""
        finish, cached = sequence.ending(), self._cached_once(sequence)
        if finish is not None:
            self._end(sequence)
        stop = token if finish == "stop" else None
        return Delta(sequence.id, (token,), logprobs, prompt_logprobs, finish, stop, None, cached)

    @staticmethod
    def _cached_once(sequence: LiveSequence) -> int | None:
        """`cached` for the first delta, None after that."""
        if sequence.told:
            return None
        sequence.told = True
        return sequence.cached

    # From place to place

    def _wait(self, sequence: LiveSequence) -> None:
        """Into the waiting room, unless there is nothing to wait for."""
        sequence.place = Place.WAITING
        self._waiting.push(sequence)
        prompt_length, layout = sequence.log.prompt_length, self._layout
        if not 0 < prompt_length <= len(sequence.tokens):
            self._fail(sequence, "the prompt is empty")
        elif prompt_length >= layout.max_model_len:
            self._fail(sequence, self._too_long(sequence))
        elif len(sequence.tokens) > prompt_length and (finish := sequence.ending()) is not None:
            # A log that came back complete: the delta that ended it was lost with an earlier engine.
            stop = sequence.tokens[-1] if finish == "stop" else None
            self._end(sequence)
            self._news[sequence.id] = Delta(sequence.id, finish=finish, stop_token=stop, cached=0)
        elif len(sequence.tokens) > layout.num_pages * layout.page_size:
            self._fail(sequence, self._too_long(sequence))

    def _release_followers(self, leader: LiveSequence) -> None:
        followers, leader.followers = leader.followers, []
        for sequence in followers:
            self._wait(sequence)

    def _preempt(self, sequence: LiveSequence) -> None:
        """Back to the head of its queue, once what it has in flight has been committed."""
        self._preemptions += 1
        self._running.vacate(sequence, keep=True)
        if self._flights:
            sequence.place = Place.RETURNING
            self._returning[sequence] = self._flights[-1].step
        else:
            self._wait(sequence)

    def _fail(self, sequence: LiveSequence, reason: str) -> None:
        """End with an error that no result brings; the next commit tells it."""
        cached = self._cached_once(sequence)
        self._end(sequence)
        self._news[sequence.id] = Delta(sequence.id, finish="error", error=reason, cached=cached)

    def _end(self, sequence: LiveSequence, *, keep: bool = True) -> None:
        """The one way out. Without `keep`, what it computed is not left in the prefix cache."""
        match sequence.place:
            case Place.RUNNING:
                self._running.vacate(sequence, keep=keep)
            case Place.WAITING:
                self._waiting.remove(sequence)
            case Place.RETURNING:
                del self._returning[sequence]
            case Place.FOLLOWING:
                assert sequence.log.after is not None
                self._sequences[sequence.log.after].followers.remove(sequence)
            case Place.ENDED:
                raise AssertionError(f"sequence {sequence.id} ends twice")
        sequence.place = Place.ENDED
        del self._sequences[sequence.id]
        self._release_followers(sequence)
        self._alive[sequence.key] -= 1
        if not self._alive[sequence.key]:
            del self._alive[sequence.key]
            self._policy.forget(sequence.key)

    def _too_long(self, sequence: LiveSequence) -> str:
        memory = self._layout.num_pages * self._layout.page_size
        return (
            f"a sequence of {len(sequence.tokens)} tokens cannot go on: "
            f"the context has {self._layout.max_model_len} tokens and KV memory {memory}"
        )

    # What it looks like from outside

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have none, for whatever reason."""
        return len(self._sequences) - len(self._running)

    @property
    def in_flight(self) -> int:
        """Plans whose results have not been committed."""
        return len(self._flights)

    @property
    def pages_used(self) -> int:
        """Pages that running sequences hold; cached ones that nobody reads do not count."""
        return self._running.pages_used

    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache, first admissions only."""
        return self._prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Tokens found there."""
        return self._prefix_hits

    @property
    def preemptions(self) -> int:
        """How often a running sequence had to drop its pages."""
        return self._preemptions

    def adapters(self) -> tuple[set[str], set[str]]:
        """Digests of the adapters of running sequences, and of waiting ones."""
        running = {s.log.adapter for s in self._running if s.log.adapter is not None}
        waiting = {
            s.log.adapter for s in self._sequences.values() if s.slot is None and s.log.adapter is not None
        }
        return running, waiting

    def check_integrity(self) -> None:
        """Raises AssertionError that says where the books disagree. Costs a walk over everything."""
        places: dict[LiveSequence, Place] = dict.fromkeys(self._running, Place.RUNNING)
        listed = len(places)
        for sequences, place in (
            (self._waiting, Place.WAITING),
            (self._returning, Place.RETURNING),
            ([f for s in self._sequences.values() for f in s.followers], Place.FOLLOWING),
        ):
            for sequence in sequences:
                places[sequence] = place
                listed += 1
        assert listed == len(places) == len(self._sequences), (
            f"{len(self._sequences)} sequences, {len(places)} of them in {listed} places"
        )
        for sequence, place in places.items():
            assert self._sequences.get(sequence.id) is sequence, f"sequence {sequence.id} outlives its end"
            assert sequence.place is place, (
                f"sequence {sequence.id} is {sequence.place.name}, found {place.name}"
            )
            assert (sequence.slot is None) == (place is not Place.RUNNING), f"sequence {sequence.id}: slot"
            assert place is Place.RUNNING or not (sequence.pages or sequence.lease), (
                f"sequence {sequence.id} holds pages while {place.name}"
            )
        assert self._alive == Counter(s.key for s in places), "a key outlives its sequences, or the reverse"
        assert not self._returning or self._flights, (
            "a preempted sequence waits for a result that never comes"
        )
        self._running.check_integrity()
        assert places or not self.pages_used, f"idle with {self.pages_used} pages neither free nor cached"
