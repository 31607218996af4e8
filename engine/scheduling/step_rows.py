"""The rows of a step: who has one, for as long as there are tokens and pages, and what its result changes."""

import math
from collections.abc import Callable
from typing import NamedTuple

from personae.engine.plan import Admission, Drafted, MemoryLayout, Row, StepResult
from personae.engine.scheduling.live import LiveSequence, SequenceState
from personae.engine.scheduling.sequence_table import SequenceTable
from personae.engine.sequence import Delta, TokenLogprobs

Chunks = list[tuple[LiveSequence, Row]]
NO_DRAFTS = Drafted(0, 0)


class KeptRows(NamedTuple):
    """What stays of a plan that is made again: rows of decoding sequences, those with drafts, and other
    chunks; and admissions, whose chunks may become shorter."""

    decoding: Chunks
    drafting: Chunks
    chunks: Chunks
    admitted: Chunks


class TokenBudget:
    """The tokens that a step still has. At most `background` of them are for background sequences, and at
    most `over_quota` for prompts of tenants over quota (`slot_quota.py`)."""

    __slots__ = ("background", "over_quota", "spent", "tokens")

    def __init__(self, tokens: int, background: int, over_quota: int | None = None) -> None:
        self.tokens = tokens
        self.background = background
        self.over_quota = tokens if over_quota is None else over_quota
        self.spent = 0  # by background sequences

    def of(self, sequence: LiveSequence, *, is_over_quota: bool = False) -> int:
        """What this sequence may have. A background sequence that was admitted while others wait has at least
        one token."""
        if sequence.background:
            return min(self.tokens, max(self.background, int(sequence.settled)))
        if is_over_quota:
            return min(self.tokens, self.over_quota)
        return self.tokens

    def spend(self, tokens: int, *, background: bool, is_over_quota: bool = False) -> None:
        """Take tokens from the budget."""
        self.tokens -= tokens
        if background:
            self.background = max(self.background - tokens, 0)
            self.spent += tokens
        elif is_over_quota:
            self.over_quota = max(self.over_quota - tokens, 0)


class StepBuilder:
    """Collects the content of a plan, and preempts sequences if it must.

    `rows` are those of `decoding` sequences, then those of `chunks`. The first `drafting` chunks are decode
    rows that may have drafts. `drafts` is how many a row may have, none in this step if it is `resting`;
    `last_step` is the last plan in flight. `kept` is what stays of a plan that is made again; then it
    preempts none.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        sequences: SequenceTable,
        budget: TokenBudget,
        drafts: int,
        last_step: int | None,
        *,
        resting: bool = False,
        kept: KeptRows | None = None,
    ) -> None:
        self._layout = layout
        self._sequences = sequences
        self._running = sequences.running
        self._budget = budget
        self._drafts = drafts
        self._resting = resting
        self._last_step = last_step
        self.rows: list[Row] = []
        self.decoding: list[LiveSequence] = []
        self.chunks: Chunks = []
        self.drafting = 0
        self.admissions: list[Admission] = []
        self._preempts = kept is None
        self._drafting: Chunks = []
        self._admitted: Chunks = []
        self._kept: set[LiveSequence] = set()
        if kept is not None:
            self._keep(kept)

    def _keep(self, kept: KeptRows) -> None:
        self.rows += [row for _, row in kept.decoding]
        self.decoding += [sequence for sequence, _ in kept.decoding]
        self.chunks += kept.chunks
        self._drafting += kept.drafting
        self._admitted += kept.admitted
        self._kept |= {sequence for rows in kept for sequence, _ in rows}
        for sequence, row in (*kept.decoding, *kept.drafting, *kept.chunks):
            self._budget.spend(row.count + row.drafts, background=sequence.background)

    def add_decodes(self, most: int | None = None) -> None:
        """A row for each decoding sequence that is not left out, by rank; for background ones within the
        budget. A sequence with forced tokens has a chunk of these, from the tokens that are left after each
        sequence has one. `most`: how many rows, and only those whose tokens are known; None: all."""
        budget, chunks, drafting = self._budget, self.chunks, self._drafting
        spare = max(budget.tokens - len(self._running), 0)
        left_out = self._sequences.left_out | self._kept
        left = None if most is None else most - len(self.rows) - len(drafting)
        # The loop may only remove sequences at or after its current position.
        for sequence in self._running.decoding:
            position = sequence.planned
            if position >= sequence.last or sequence in left_out:
                continue  # the token that ends it is in flight, or other tenants' rows go first
            ahead = len(sequence.tokens) - position
            if left is not None:
                if left <= 0 or ahead < 1:
                    continue  # its token is in flight, or it has a row in the next step
                left -= 1
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
                drafting.append((sequence, Row(sequence.slot, position, 1, True, pages, drafts)))
                budget.spend(1 + drafts, background=sequence.background)
                spare -= drafts
                sequence.planned = position + 1 + drafts
                continue
            row = Row(sequence.slot, position, count, count >= ahead, pages)
            if ahead < 2:
                self.rows.append(row)
                self.decoding.append(sequence)
            else:
                chunks.append((sequence, row))
                spare -= count - 1
            if sequence.background:
                budget.spend(count, background=True)
            else:
                budget.tokens -= count
            sequence.planned = position + count
        self.drafting = len(drafting)
        if drafting:
            chunks[:0] = drafting
        if chunks:
            self.rows += [row for _, row in chunks]

    def charge_decodes(self) -> None:
        """Charge tenants for their decode rows. Rows that were kept are charged already."""
        kept = self._kept
        for sequence in self.decoding:
            if sequence not in kept:
                self._sequences.serve(sequence, 1, prompt=False)
        for sequence, row in self.chunks:
            if sequence not in kept:
                self._sequences.serve(sequence, row.count + row.drafts, prompt=False)

    def _drafts_of(self, sequence: LiveSequence, spare: int) -> int:
        """How many drafts the sequence's next row may have: from the tokens that are left, within its pages,
        and in one more page if each running sequence has one to grow into."""
        position = sequence.planned + 1
        most = min(sequence.drafts, spare, sequence.last - position)
        if sequence.background or self._resting:
            return 0
        assert sequence.region is not None
        if position + most > sequence.capacity and sequence.region.room < 1:
            most = sequence.capacity - position
        return max(min(most, sequence.capacity + self._layout.page_size - position), 0)

    def _grow(self, sequence: LiveSequence, count: int) -> tuple[tuple[int, ...], int]:
        """Pages for `count` more positions, and how many positions fit. None fit if the sequence was
        preempted."""
        pages: list[int] = []
        while sequence.planned + count > sequence.capacity and self._make_room(sequence):
            pages += self._running.grow(sequence)
        return tuple(pages), min(count, sequence.capacity - sequence.planned)

    def _make_room(self, sequence: LiveSequence) -> bool:
        """Ensure that a running sequence can get a page; preempts sequences admitted after it. False if it
        cannot."""
        table, region = self._running, sequence.region
        assert region is not None
        if not self._preempts:
            return table.can_grow(sequence)
        while not table.can_grow(sequence):
            if self._drafts and table.reclaim(sequence):
                continue
            last = table.last(region)
            if region.sequences == 1 and sequence.planned > sequence.computed:
                return False  # its last token is in flight and may end it
            if region.sequences > 1 or sequence.doubled:
                self._sequences.preempt(last, self._last_step)
            else:
                self._sequences.fail(sequence)
            if last is sequence:
                return False
        return True

    def add_admitted(self) -> None:
        """Chunks of what the plan that is made again has admitted: one token for tenants over quota."""
        after = len(self._admitted)
        for sequence, row in self._admitted:
            after -= 1
            self._add_chunk(sequence, row.pages, min(row.count, self._budget.tokens - after))

    def add_prompts(self, begun: list[LiveSequence], of: str | None = None) -> None:
        """Chunks of prompts that have begun, then of newly admitted ones, within the budget. With `of` only
        that tenant's prompts are admitted."""
        budget = self._budget
        for sequence in begun:
            if sequence in self._kept:
                continue
            if budget.of(sequence, is_over_quota=self._sequences.is_over_quota(sequence)):
                self._add_chunk(sequence, ())
        waiting = self._sequences.waiting
        while (
            (waiting.foreground or waiting.background) and budget.tokens and (of is None or budget.over_quota)
        ):
            admitted = self._sequences.admit(
                background=budget.background > 0, over_quota=budget.over_quota > 0, of=of
            )
            if admitted is None:
                break
            assert admitted.slot is not None
            self.admissions.append(Admission(admitted.slot, admitted.log))
            self._add_chunk(admitted, tuple(admitted.pages))

    def _add_chunk(self, sequence: LiveSequence, pages: tuple[int, ...], most: float = math.inf) -> None:
        """As much of its log as the budget allows, and at most so many tokens. The last chunk samples."""
        assert sequence.slot is not None
        is_over_quota = self._sequences.is_over_quota(sequence)
        # A newly admitted sequence always gets a row, which carries its pages.
        allowed = max(self._budget.of(sequence, is_over_quota=is_over_quota), 1 if pages else 0)
        count = int(min(allowed, most, sequence.known - sequence.planned))
        samples = sequence.planned + count == sequence.known
        row = Row(sequence.slot, sequence.planned, count, samples, pages)
        self.rows.append(row)
        self.chunks.append((sequence, row))
        sequence.planned += count
        self._budget.spend(count, background=sequence.background, is_over_quota=is_over_quota)
        self._sequences.serve(sequence, count, prompt=True)
        if samples:
            self._running.begin_decoding(sequence)


class OutputProcessor:
    """The scheduler's half after a step. Deltas are appended to the given list.

    `in_flight` returns how many rows of a sequence are planned but not committed.
    """

    def __init__(self, sequences: SequenceTable, in_flight: Callable[[LiveSequence], int]) -> None:
        self._sequences = sequences
        self._in_flight = in_flight

    def plain(
        self, decoding: list[LiveSequence], tokens: tuple[tuple[int, ...], ...], deltas: list[Delta]
    ) -> None:
        """The same as `row` for decode rows without failures, logprobs, drafts or deferred rows: the usual,
        hot case."""
        charge, running, ended = self._sequences.policy.charge, SequenceState.RUNNING, SequenceState.ENDED
        publish = self._sequences.running.publish
        for sequence, brought in zip(decoding, tokens, strict=False):
            place = sequence.place
            if place is ended:
                continue
            if place is running:
                sequence.computed += 1
                if sequence.computed >= sequence.publish_at:
                    publish(sequence)
            if not brought:
                self._check_known(sequence)
                continue
            known = sequence.tokens
            known += brought
            count = len(brought)
            if count > 1:
                self._sequences.counters.jumped += count - 1
            charge(sequence.key, 0, count)
            if brought[-1] in sequence.stops or len(known) >= sequence.limit:
                deltas.append(self._delta(sequence, brought))
            else:
                deltas.append(Delta(sequence.id, brought))

    def row(
        self, sequence: LiveSequence, index: int, row: Row | None, result: StepResult, deltas: list[Delta]
    ) -> None:
        """Apply one row's result. `row` is given for chunks; a decode row is one position."""
        if sequence.place is SequenceState.ENDED:
            return  # discarded
        failure = result.failures.get(index)
        if failure is not None:
            cached = sequence.cached_once()
            self._sequences.end(sequence, keep=False)
            code = result.codes.get(index)
            deltas.append(Delta(sequence.id, finish="error", error=failure, cached=cached, code=code))
            return
        deferred = index in result.deferred
        if deferred and (sequence.stale or sequence.place is not SequenceState.RUNNING):
            sequence.stale = max(sequence.stale - 1, 0)
            return  # planned before it was known that the row before was deferred
        accepted = 0
        if row is not None and row.drafts:
            accepted = self._verified(sequence, row, result.drafted.get(index, NO_DRAFTS))
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if row is not None and index in result.prompt_logprobs:
            first = row.start + 1 if row.start else 0  # the prompt token of the first entry
            # After a preemption the prompt is computed again, but nothing is delivered twice.
            prompt_logprobs = result.prompt_logprobs[index][max(sequence.prompt_logprobs_sent - first, 0) :]
            sequence.prompt_logprobs_sent += len(prompt_logprobs)
        if sequence.place is SequenceState.RUNNING:
            sequence.computed += (1 if row is None else row.count) - deferred + accepted
            if not accepted:
                self._sequences.running.publish(sequence)
            if deferred:
                self._sequences.running.park(sequence, self._in_flight(sequence))
            if sequence.computed >= sequence.log.prompt_length:
                self._sequences.release_followers(sequence)
        if not deferred and (row is None or row.samples):
            tokens = result.tokens[index]
            sequence.tokens += tokens
            if accepted and sequence.place is SequenceState.RUNNING:
                # The token after the last right draft may be undecided: its position is computed again.
                undecided = max(sequence.computed - len(sequence.tokens) + 1, 0)
                sequence.computed -= undecided
                sequence.planned -= undecided
                self._sequences.running.publish(sequence)  # the computed tokens include this step's
            if not tokens:
                self._check_known(sequence)
                return
            self._sequences.counters.jumped += max(len(tokens) - 1 - accepted, 0)
            self._sequences.policy.charge(sequence.key, 0, len(tokens))
            drafted = result.drafted.get(index)
            counts = None if drafted is None else drafted[:2]
            logprobs = result.logprobs.get(index, ())
            embedding = result.embeddings.get(index)
            deltas.append(self._delta(sequence, tokens, logprobs, prompt_logprobs, counts, embedding))
        elif prompt_logprobs:
            deltas.append(Delta(sequence.id, prompt_logprobs=prompt_logprobs, cached=sequence.cached_once()))

    def _verified(self, sequence: LiveSequence, row: Row, drafted: Drafted) -> int:
        """Take back the positions planned for drafts that were not made or are wrong. Returns how many are
        right."""
        computed, accepted, source = drafted
        if sequence.place is SequenceState.RUNNING:
            sequence.planned -= row.drafts - accepted
        if computed:
            self._sequences.counters.count_drafts(computed, accepted, source)
        return accepted

    def _check_known(self, sequence: LiveSequence) -> None:
        """Check a row without new tokens: the token after it must be known and delivered already.

        Raises ValueError if it is not.
        """
        if sequence.place is SequenceState.RUNNING and len(sequence.tokens) <= sequence.computed:
            raise ValueError(f"sequence {sequence.id!r} should have sampled a token")

    def _delta(
        self,
        sequence: LiveSequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
        drafted: tuple[int, int] | None = None,
        embedding: bytes | None = None,
    ) -> Delta:
        """The delta of tokens that were just committed. Ends the sequence if they were its last."""
        finish, cached = sequence.ending(), sequence.cached_once()
        if finish is not None:
            self._sequences.end(sequence)
        stop = tokens[-1] if finish == "stop" else None
        return Delta(
            sequence.id,
            tokens,
            logprobs,
            prompt_logprobs,
            finish,
            stop,
            None,
            cached,
            drafted=drafted,
            embedding=embedding,
        )
