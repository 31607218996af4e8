"""What a step's result means for the sequences that had rows in it: their logs, their pages, their deltas."""

from collections.abc import Callable

from personae.engine.plan import Row, StepResult
from personae.engine.scheduling.fairness import FairnessPolicy
from personae.engine.scheduling.live import LiveSequence, SequenceState
from personae.engine.scheduling.sequence_table import SequenceTable
from personae.engine.sequence import Delta, TokenLogprobs


class OutputProcessor:
    """Brings results home: the scheduler's half after a step. Deltas go to the end of the list given.

    `in_flight` tells how many rows of a sequence are planned and not here yet.
    """

    def __init__(
        self, policy: FairnessPolicy, sequences: SequenceTable, in_flight: Callable[[LiveSequence], int]
    ) -> None:
        self._policy = policy
        self._sequences = sequences
        self._in_flight = in_flight

    def plain(
        self, decoding: list[LiveSequence], tokens: tuple[int | None, ...], deltas: list[Delta]
    ) -> None:
        """What `row` does, for decode rows without failures, logprobs, forced tokens and rows that sit out:
        the usual case, and hot."""
        charge, running, ended = self._policy.charge, SequenceState.RUNNING, SequenceState.ENDED
        publish = self._sequences.running.publish
        for sequence, token in zip(decoding, tokens, strict=False):
            place = sequence.place
            if place is ended:
                continue
            if place is running:
                sequence.computed += 1
                if sequence.computed >= sequence.publish_at:
                    publish(sequence)
            if token is None:
                raise ValueError(f"sequence {sequence.id!r} should have sampled a token")
            known = sequence.tokens
            known.append(token)
            charge(sequence.key, 0, 1)
            if token in sequence.stops or len(known) >= sequence.limit:
                deltas.append(self._tell(sequence, (token,)))
            else:
                deltas.append(Delta(sequence.id, (token,)))

    def row(
        self, sequence: LiveSequence, index: int, row: Row | None, result: StepResult, deltas: list[Delta]
    ) -> None:
        """Bring one row's result home. `row` is given for chunks; a decode row is one position."""
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
            return  # planned before it was known that the row before sits out
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if row is not None and index in result.prompt_logprobs:
            first = row.start + 1 if row.start else 0  # the prompt token that the entries begin with
            # After a preemption the prompt is computed again; what was told is not told twice.
            prompt_logprobs = result.prompt_logprobs[index][max(sequence.prompt_logprobs_sent - first, 0) :]
            sequence.prompt_logprobs_sent += len(prompt_logprobs)
        if sequence.place is SequenceState.RUNNING:
            sequence.computed += (1 if row is None else row.count) - deferred
            self._sequences.running.publish(sequence)
            if deferred:
                self._sequences.running.park(sequence, self._in_flight(sequence))
            if sequence.computed >= sequence.log.prompt_length:
                self._sequences.release_followers(sequence)
        if not deferred and (row is None or row.samples):
            token = result.tokens[index]
            if token is None:
                raise ValueError(f"sequence {sequence.id!r} should have sampled a token")
            tokens = result.forced.get(index, (token,))
            if not tokens:
                return  # they are known, and told
            sequence.tokens += tokens
            self._sequences.counters.jumped += len(tokens) - 1
            self._policy.charge(sequence.key, 0, len(tokens))
            logprobs = result.logprobs.get(index)
            deltas.append(
                self._tell(sequence, tokens, () if logprobs is None else (logprobs,), prompt_logprobs)
            )
        elif prompt_logprobs:
            deltas.append(Delta(sequence.id, prompt_logprobs=prompt_logprobs, cached=sequence.cached_once()))

    def _tell(
        self,
        sequence: LiveSequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> Delta:
        """The delta of tokens just committed; ends the sequence if they were its last."""
        finish, cached = sequence.ending(), sequence.cached_once()
        if finish is not None:
            self._sequences.end(sequence)
        stop = tokens[-1] if finish == "stop" else None
        return Delta(sequence.id, tokens, logprobs, prompt_logprobs, finish, stop, None, cached)
