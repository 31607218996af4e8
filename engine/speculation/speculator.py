"""Decides where the rows of sequences with drafts begin, and which drafts they have.

A plan only says how much such a row may compute: when it was made, it was not known how many drafts of the
row before were right. Here this is known, before the rows are packed.

While drafts do not pay, it rests: rows have no drafts, so where they begin does not depend on the step
before, and that step is read later, as it is without speculation.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from personae.engine.plan import Drafted, Row, StepPlan
from personae.engine.sequence import SequenceLog
from personae.engine.speculation.batch_proposer import BatchProposer, Wish
from personae.engine.speculation.grammar_proposer import GrammarProposer
from personae.engine.speculation.ngram import NgramProposer
from personae.engine.speculation.policy import Candidate, Policy, Record
from personae.engine.speculation.prediction import PredictionProposer
from personae.engine.speculation.proposer import Draft, LongestMatch, Proposer
from personae.engine.speculation.slot import SlotState
from personae.engine.speculation.tenant_answers import TenantAnswers, TenantProposer
from personae.engine.stats import MAX_DRAFTS
from personae.engine.worker.known import Guess

AHEAD = 2  # plans that are made before a step's result is known
Propose = Callable[[SequenceLog], Sequence[Proposer]]


def own_text(
    log: SequenceLog,
    answers: TenantAnswers | None = None,
    same: Callable[[], Sequence[int] | None] = lambda: None,
) -> tuple[Proposer, ...]:
    """Drafts from the caller's prediction, or else from the prompt and the answer so far, or from the
    tenant's earlier `answers`. `same` returns what NgramProposer takes."""
    ngrams: Proposer = NgramProposer(log.tokens, same())
    if answers is not None:
        ngrams = LongestMatch(ngrams, TenantProposer(answers, log))
    return *expected_text(log), ngrams


def expected_text(log: SequenceLog) -> tuple[Proposer, ...]:
    """Drafts from the caller's prediction, if there is one."""
    expected = log.params.prediction
    return (PredictionProposer(expected, log.tokens[log.prompt_length :]),) if expected else ()


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
    log: SequenceLog
    records: defaultdict[str, Record] = field(default_factory=lambda: defaultdict(Record))
    rows: deque[_Row] = field(default_factory=deque)  # those whose results are not known yet

    @property
    def next_position(self) -> int | None:
        """Where its next row begins, if the rows without results have no drafts."""
        position = self.state.position
        return None if position is None else position + sum(row.count for row in self.rows)


class Speculator:
    """Follows the sequences that may have drafts, by slot. `propose` makes a sequence's proposers. `model`
    makes drafts for sequences that these have no good guess for. `answers` gets the answers of sequences that
    leave.

    `drafting_seconds`: the time that the draft model took for the last plan.
    """

    def __init__(
        self,
        policy: Policy,
        propose: Propose = own_text,
        model: BatchProposer | None = None,
        answers: TenantAnswers | None = None,
    ) -> None:
        self.policy = policy
        self._propose = propose
        self._model = model
        self._answers = answers
        self._slots: dict[int, _Slot] = {}
        self.drafting_seconds = 0.0
        self._rest = 0  # steps for which no drafts are looked for

    @property
    def resting(self) -> bool:
        """Whether the next plans need no drafts. Plans are made a few steps ahead."""
        return self._rest > AHEAD

    def needs_results(self, plan: StepPlan) -> bool:
        """Whether the results of the last step must be known before this plan's rows are resolved."""
        if not self._rest or plan.releases or plan.admissions:
            return True
        for row in plan.rows:
            slot = self._slots.get(row.slot)
            if slot is None:
                continue
            begins = slot.next_position
            if begins is None or row.start < begins or any(each.drafts for each in slot.rows):
                return True
        return False

    def begin(self, plan: StepPlan) -> None:
        """A plan begins. Call it before `resolve`."""
        self.drafting_seconds = 0.0
        if self._model is not None:
            self._model.begin(plan)

    def admit(self, slot: int, log: SequenceLog, grammar: GrammarProposer | None = None) -> None:
        """A sequence takes a slot. `grammar` is asked before the other proposers, and cuts their drafts."""
        proposers = self._propose(log)
        if grammar is not None:
            proposers = grammar, *map(grammar.within, proposers)
        state = SlotState(log, proposers)
        self._slots[slot] = _Slot(state, log)

    def took(self, longest: int, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens, `longest` of them in one row, took `seconds`. The policy learns from
        steps without prompts."""
        if longest <= 1 + MAX_DRAFTS:
            self.policy.took(tokens, seconds)

    def paced(self, plan: StepPlan, seconds: float, *, ahead: bool) -> None:
        """From the step with this plan to the next one it took `seconds`. `ahead`: see Policy."""
        if all(row.count == 1 for row in plan.rows):
            self.policy.paced(len(plan.rows), seconds, ahead=ahead)

    def release(self, slot: int) -> None:
        """The slot's sequence has left."""
        left = self._slots.pop(slot, None)
        if left is not None and self._answers is not None:
            self._answers.add(left.log, left.state.tokens)

    def follows(self, slot: int) -> bool:
        """Whether this slot's rows are resolved here."""
        return slot in self._slots

    def ends(self, slot: int, position: int, token: int) -> bool:
        """See `SlotState.ends`."""
        return self._slots[slot].state.ends(position, token)

    def brought(self, slot: int, accepted: int, tokens: Sequence[int]) -> Drafted | None:
        """A row of the last step emitted these tokens, and `accepted` of its drafts were right. Returns what
        became of the drafts in the plan; None if none were computed."""
        followed = self._slots[slot]
        row = followed.rows.popleft()
        followed.state.brought(row.count + accepted, tokens)
        if row.candidate is not None:
            self.policy.verified(row.candidate, row.drafts, accepted)
        if not row.known and not row.drafts:
            return None
        source = "forced" if row.candidate is None else row.candidate.draft.source
        return Drafted(row.known + row.drafts, row.known + accepted, source)

    def resolve(self, rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], dict[int, Guess]]:
        """The rows to compute, and by index the guesses of those that have some."""
        resolved = list(rows)
        guesses: dict[int, Guess] = {}
        candidates: dict[int, Candidate] = {}
        looks = not self._rest and any(row.drafts for row in rows)
        self._rest = max(self._rest - 1, 0)
        for index, row in enumerate(rows):
            slot = self._slots.get(row.slot)
            if slot is None:
                continue
            if slot.rows:  # its tokens are not known yet
                begins = slot.next_position
                assert begins is not None
                resolved[index] = Row(row.slot, begins, row.count, row.samples, row.pages)
                slot.rows.append(_Row(row.count, 0))
                continue
            tokens = slot.state.tokens
            start = row.start if slot.state.position is None else slot.state.position
            start = min(start, len(tokens) - 1)  # after a failure nothing is known, and the row is discarded
            slot.state.position = start
            count = min(row.count + row.drafts, len(tokens) - start) if row.drafts else row.count
            samples = row.samples and start + count == len(tokens)
            slot.rows.append(_Row(count, count - row.count))
            resolved[index] = Row(row.slot, start, count, samples, row.pages)
            if count > row.count:
                guesses[index] = Guess(tuple(tokens[start : start + count]), ())
            room = row.count + row.drafts - count
            if (
                looks
                and room
                and samples
                and (candidate := self._candidate(row.slot, slot, start, room)) is not None
            ):
                candidates[index] = candidate
        if looks:
            tried = bool(candidates) and self._apply_policy(resolved, candidates, guesses)
            self._rest = self.policy.rest(len(rows), tried=tried)
        return tuple(resolved), guesses

    def _candidate(self, slot: int, followed: _Slot, start: int, room: int) -> Candidate | None:
        """What may be guessed after a sequence that is computed up to `start`: the draft of a proposer, or
        one that the model would make."""
        text = model = None
        if (draft := followed.state.propose(room)) is not None:
            text = Candidate(draft, followed.records[draft.source])
        if self._model is not None:
            length, prompt = len(followed.state.tokens), followed.log.prompt_length
            most, source = self._model.room(start, length, room), self._model.source
            lag, each = self._model.lag(slot, length), self._model.catch_up
            if most and self.policy.catches_up(lag, length - prompt, each):
                model = Candidate(Draft((), source), followed.records[source], most)
        if text is None or model is None:
            return text or model
        return self.policy.prefer(text, model)

    def _apply_policy(
        self, rows: list[Row], candidates: dict[int, Candidate], guesses: dict[int, Guess]
    ) -> bool:
        """Let the policy say how much of each draft is computed. Returns whether any is."""
        total = sum(row.count for row in rows)
        counts = dict(zip(candidates, self.policy.choose(total, tuple(candidates.values())), strict=True))
        made = self._draft(rows, candidates, counts)
        for index, candidate in candidates.items():
            row = rows[index]
            drafts = made.get(row.slot, ()) if candidate.promised else candidate.draft.tokens[: counts[index]]
            if not drafts:
                continue
            slot = self._slots[row.slot]
            slot.rows[-1].candidate, slot.rows[-1].drafts = candidate, len(drafts)
            tokens = slot.state.tokens[row.start : row.start + row.count]
            guesses[index] = Guess((*tokens, *drafts), drafts)
            rows[index] = replace(row, count=row.count + len(drafts))
        return any(counts.values())

    def _draft(
        self, rows: list[Row], candidates: dict[int, Candidate], counts: dict[int, int]
    ) -> dict[int, tuple[int, ...]]:
        """The drafts of the model, by slot."""
        wishes = {
            (slot := rows[index].slot): Wish(self._slots[slot].state.tokens, counts[index])
            for index, candidate in candidates.items()
            if candidate.promised and counts[index]
        }
        if self._model is None or not wishes:
            return {}
        made = self._model.propose(wishes)
        for tokens, seconds in self._model.passes:
            self.drafting_seconds += seconds
            self.policy.drafted(tokens, seconds)
        return made
