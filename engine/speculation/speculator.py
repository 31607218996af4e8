"""Decides where the rows of sequences with drafts begin, and which drafts they have.

A plan only says how much such a row may compute: when it was made, it was not known how many drafts of the
row before were right. Here this is known, before the rows are packed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from personae.engine.plan import Row
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.ngram import NgramProposer
from personae.engine.speculation.policy import Candidate, Policy, Record
from personae.engine.speculation.prediction import PredictionProposer
from personae.engine.speculation.proposer import Proposer
from personae.engine.speculation.slot import SlotState
from personae.engine.stats import MAX_DRAFTS
from personae.engine.worker.known import Guess

Propose = Callable[[SequenceLog], Sequence[Proposer]]


def own_text(log: SequenceLog) -> tuple[Proposer, ...]:
    """Drafts from the caller's prediction, or else from the prompt and the answer so far."""
    ngrams = NgramProposer(log.tokens)
    if not log.params.prediction:
        return (ngrams,)
    return PredictionProposer(log.params.prediction, log.tokens[log.prompt_length :]), ngrams


@dataclass(slots=True)
class _Row:
    """A slot's row of the last step: its positions without drafts, how many of them take the place of planned
    drafts, and its drafts."""

    count: int
    known: int
    candidate: Candidate | None = None
    drafts: int = 0


@dataclass(slots=True)
class _Slot:
    state: SlotState
    record: Record = field(default_factory=Record)
    row: _Row | None = None


class Speculator:
    """Follows the sequences that may have drafts, by slot. `propose` makes a sequence's proposers."""

    def __init__(self, policy: Policy, propose: Propose = own_text) -> None:
        self.policy = policy
        self._propose = propose
        self._slots: dict[int, _Slot] = {}

    def admit(self, slot: int, log: SequenceLog, forced: Proposer | None = None) -> None:
        """A sequence takes a slot. `forced` is asked before the other proposers."""
        proposers = self._propose(log)
        self._slots[slot] = _Slot(SlotState(log, proposers if forced is None else (forced, *proposers)))

    def took(self, longest: int, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens, `longest` of them in one row, took `seconds`. The policy learns from
        steps without prompts."""
        if longest <= 1 + MAX_DRAFTS:
            self.policy.took(tokens, seconds)

    def release(self, slot: int) -> None:
        """The slot's sequence has left."""
        self._slots.pop(slot, None)

    def follows(self, slot: int) -> bool:
        """Whether this slot's rows are resolved here."""
        return slot in self._slots

    def ends(self, slot: int, position: int, token: int) -> bool:
        """See `SlotState.ends`."""
        return self._slots[slot].state.ends(position, token)

    def brought(self, slot: int, accepted: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A row of the last step emitted these tokens, and `accepted` of its drafts were right. Returns, of
        the drafts in the plan, how many were computed and how many are kept; None if there were none."""
        followed = self._slots[slot]
        row, followed.row = followed.row, None
        assert row is not None, f"slot {slot} had no row"
        followed.state.brought(row.count + accepted, tokens)
        if row.candidate is not None:
            self.policy.verified(row.candidate, row.drafts, accepted)
        return (row.known + row.drafts, row.known + accepted) if row.known or row.drafts else None

    def resolve(self, rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], dict[int, Guess]]:
        """The rows to compute, and by index the guesses of those that have some."""
        resolved = list(rows)
        guesses: dict[int, Guess] = {}
        candidates: dict[int, Candidate] = {}
        for index, row in enumerate(rows):
            slot = self._slots.get(row.slot)
            if slot is None:
                continue
            tokens = slot.state.tokens
            start = row.start if slot.state.position is None else slot.state.position
            start = min(start, len(tokens) - 1)  # after a failure nothing is known, and the row is discarded
            slot.state.position = start
            count = min(row.count + row.drafts, len(tokens) - start) if row.drafts else row.count
            samples = row.samples and start + count == len(tokens)
            slot.row = _Row(count, count - row.count)
            resolved[index] = Row(row.slot, start, count, samples, row.pages)
            if count > row.count:
                guesses[index] = Guess(tuple(tokens[start : start + count]), ())
            room = row.count + row.drafts - count
            if room and samples and (draft := slot.state.propose(room)) is not None:
                candidates[index] = Candidate(draft, slot.record)
        if candidates:
            self._apply_policy(resolved, candidates, guesses)
        return tuple(resolved), guesses

    def _apply_policy(
        self, rows: list[Row], candidates: dict[int, Candidate], guesses: dict[int, Guess]
    ) -> None:
        """Let the policy say how much of each draft is computed."""
        total = sum(row.count for row in rows)
        counts = self.policy.choose(total, tuple(candidates.values()))
        for (index, candidate), count in zip(candidates.items(), counts, strict=True):
            if not count:
                continue
            row = rows[index]
            slot = self._slots[row.slot]
            assert slot.row is not None
            slot.row.candidate, slot.row.drafts = candidate, count
            drafts = candidate.draft.tokens[:count]
            tokens = slot.state.tokens[row.start : row.start + row.count]
            guesses[index] = Guess((*tokens, *drafts), drafts)
            rows[index] = replace(row, count=row.count + count)
