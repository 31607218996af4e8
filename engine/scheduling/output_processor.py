"""Applies a step's results to its sequences: their logs, their pages, their deltas."""

from collections.abc import Callable

from personae.engine.plan import Drafted, Row, StepResult
from personae.engine.scheduling.live import LiveSequence, SequenceState
from personae.engine.scheduling.sequence_table import SequenceTable
from personae.engine.sequence import Delta, TokenLogprobs

NO_DRAFTS = Drafted(0, 0)


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
