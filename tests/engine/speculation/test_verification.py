"""Drafts of a batch are verified as if each position were chosen in a step of its own, one sequence alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.engine.params import SamplingParams
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog, TokenLogprobs
from personae.engine.speculation.verification import DraftRow, Slots, verify
from personae.grammar.bitmask import Bitmask, mask_of
from personae.grammar.masks import BitmaskPool, fill_masks, verifying
from personae.grammar.matcher import UNDECIDED, Binding, Undecided

VOCAB = 70
MOST = 5  # drafts of a row


class Rules(Binding):
    """A grammar that depends on all tokens so far. It refuses some of the tokens that it allows, and
    `verifies` some."""

    verifies = False

    def __init__(self, seed: int, *, verifies: bool) -> None:
        self._seed = seed
        self.verifies = verifies
        self.taken: list[int] = []

    def _dice(self, *about: Any) -> np.random.Generator:
        return np.random.default_rng(hash((self._seed, *self.taken, *about)) % 2**32)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = mask_of(self._dice().random(VOCAB) < 0.6)

    def accept(self, token: int) -> bool:
        if self._dice(token, 1).random() < 0.05:
            return False
        self.taken.append(token)
        return True

    def veto(self, token: int) -> np.ndarray | Undecided | None:
        chance = self._dice(token, 2).random()
        if chance > 0.95:
            return UNDECIDED
        return mask_of(np.arange(VOCAB) == token).view(np.uint32) if chance < 0.3 else None


class Forcing:
    """Forces one or two tokens after some."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def take(self, token: int) -> tuple[int, ...] | None:
        if not self._rules.accept(token):
            return None
        forced = tuple((token + i) % VOCAB for i in range(1, token % 5 - 1))
        self._rules.taken += forced
        return token, *forced


@dataclass(frozen=True)
class Case:
    """A row: its log, its grammar, the logits of its positions, its drafts."""

    log: SequenceLog
    logits: torch.Tensor
    rules: int | None = None
    verifies: bool = False
    jumps: bool = False
    drafts: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        return len(self.log.tokens)

    def ends(self, position: int, token: int) -> bool:
        return token in self.stops and position >= self.log.prompt_length + self.log.params.min_tokens

    def bound(self) -> tuple[Rules | None, Forcing | None]:
        rules = None if self.rules is None else Rules(self.rules, verifies=self.verifies)
        return rules, Forcing(rules) if rules is not None and self.jumps else None


@dataclass
class Outcome:
    """What a step brought a row: the tokens after the first too, and the next token after all of them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: int = 0
    refused: int | None = None
    taken: list[int] = field(default_factory=list)
    then: int | None = None


def one_by_one(case: Case) -> Outcome:
    """Each position in a step of its own."""
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.admit(0, case.log)
    rules, jump = case.bound()
    found = Outcome()

    def sample(place: int) -> int | None:
        read = step(sampler, [case], [0], [place], [case.end + place], [rules])
        found.logprobs += read.logprobs.values()
        found.tokens += [token for token in read.tokens if token is not None]
        return read.tokens[0]

    token, place = sample(0), 0
    forced: list[int] = []  # tokens that the rules have taken already
    while token is not None and place < len(case.drafts) and token == case.drafts[place]:
        if case.ends(case.end + place, token):
            break
        is_open = not forced or forced.pop(0) != token
        if is_open and rules is not None:
            brought = jump.take(token) if jump else (token,) if rules.accept(token) else None
            if brought is None:
                found.refused = token
                break
            forced = [*brought[1:]]
            found.tokens += forced
        place += 1
        token = forced[0] if forced else sample(place)
    found.accepted = place
    return concluded(found, sampler, case, 0, rules)


def step(
    sampler: Sampler,
    cases: Sequence[Case],
    slots: list[int],
    places: list[int],
    positions: list[int],
    matchers: Sequence[Rules | None],
) -> TokenChoices:
    logits = torch.stack([case.logits[place] for case, place in zip(cases, places, strict=True)])
    bitmask = torch.full((len(cases), -(-VOCAB // 32)), -1, dtype=torch.int32)
    fill_masks(bitmask, matchers)
    return sampler.sample(logits, slots, positions, bitmask, verifying(matchers)).read()


def concluded(found: Outcome, sampler: Sampler, case: Case, slot: int, rules: Rules | None) -> Outcome:
    """The choices, and the next token, which depends on the state of the sampler."""
    found.taken = rules.taken if rules is not None else []
    position = case.end + len(found.tokens)
    found.then = step(
        sampler, [replace(case, logits=case.logits.nan_to_num())], [slot], [-1], [position], [None]
    ).tokens[0]
    return found


def all_at_once(cases: list[Case], slots: list[int]) -> tuple[list[Outcome], torch.Tensor]:
    """One step with drafts, and the newest tokens of the slots."""
    newest = torch.full((max(slots) + 1,), -1)
    sampler = Sampler(max(slots) + 1, VOCAB, "cpu", newest.__setitem__)
    sampler.ask_patience = math.inf
    for slot, case in zip(slots, cases, strict=True):
        sampler.admit(slot, case.log)
    bound = [case.bound() for case in cases]
    matchers = [rules for rules, _ in bound]
    first = step(sampler, cases, slots, [0] * len(cases), [case.end for case in cases], matchers)
    rows: dict[int, DraftRow] = {}
    behind: list[torch.Tensor] = []
    for i, (case, (rules, jump)) in enumerate(zip(cases, bound, strict=True)):
        begin = sum(map(len, behind))
        rows[i] = DraftRow(slots[i], case.end, case.drafts, begin, rules, jump)  # type: ignore[arg-type]  # a Forcing
        behind.append(case.logits[1 : 1 + len(case.drafts)])
    known: dict[tuple[int, int], int] = {}

    def extend(slot: int, position: int, tokens: tuple[int, ...]) -> None:
        known.update({(slot, position + i): token for i, token in enumerate(tokens)})

    access = Slots(
        lambda slot, position: known.get((slot, position)),
        lambda slot, position, token: cases[slots.index(slot)].ends(position, token),
        extend,
    )
    verify(rows, first.tokens, torch.cat(behind), sampler, BitmaskPool(len(cases), VOCAB), access)
    last = newest.clone()
    outcomes = []
    for i, case in enumerate(cases):
        found = Outcome(accepted=rows[i].accepted, refused=rows[i].refused)
        if (token := first.tokens[i]) is not None:
            found.tokens = [token, *rows[i].tokens]
        found.logprobs = [*([first.logprobs[i]] if i in first.logprobs else []), *rows[i].logprobs]
        outcomes.append(concluded(found, sampler, case, slots[i], matchers[i]))
    return outcomes, last


ids = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = tuple(draw(st.lists(ids, min_size=1, max_size=6)))
    rules = draw(st.none() | st.integers(0, 99))
    jumps = rules is not None and draw(st.booleans())
    stops = frozenset(draw(st.sets(ids, max_size=12)))
    counts = not jumps and draw(st.integers(0, 3)) == 0
    params = SamplingParams(
        max_tokens=100,
        seed=draw(st.integers(0, 2**64)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        top_p=draw(st.sampled_from([1.0, 0.7])),
        repetition_penalty=1.4 if counts else 1.0,
        frequency_penalty=draw(st.sampled_from([0.0, 2.0])) if counts else 0.0,
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-3.0, 2.0]), max_size=2)),
        logprobs=None if jumps else draw(st.sampled_from([None, None, 0, 2])),
        min_tokens=draw(st.integers(0, MOST)),
        stop_token_ids=tuple(sorted(stops)),
    )
    log = SequenceLog("s", tokens, draw(st.integers(1, len(tokens))), params, ())
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = torch.from_numpy(np.round(random.normal(0, 2, (MOST + 2, VOCAB)) * 4).astype(np.float32) / 4)
    if draw(st.integers(0, 5)) == 0:
        logits[draw(st.integers(0, MOST)), 3] = math.nan
    verified = rules is not None and draw(st.booleans())
    made = Case(log, logits, rules, verified, jumps, (), stops)
    # Drafts that are right up to a place: the row's own tokens, found without any.
    drafts: tuple[int, ...] = ()
    wrong = draw(st.integers(0, 2 * MOST))
    while len(drafts) < MOST:
        found = one_by_one(replace(made, drafts=drafts)).tokens
        token = found[len(drafts)] if len(drafts) < min(len(found), wrong) else draw(ids)
        drafts = (*drafts, token)
    return replace(made, drafts=drafts[: draw(st.integers(1, MOST))])


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(cases(), min_size=1, max_size=4), data=st.data())
def test_a_batch_brings_what_each_sequence_gets_alone_position_by_position(
    batch: list[Case], data: st.DataObject
) -> None:
    slots = data.draw(st.permutations(range(6)))[: len(batch)]
    found, newest = all_at_once(batch, slots)
    for case, slot, outcome in zip(batch, slots, found, strict=True):
        assert outcome == one_by_one(case)
        if outcome.tokens and not case.jumps:  # the host knows forced tokens
            assert newest[slot] == outcome.tokens[-1]


def plain(drafts: int = 0, **params: Any) -> Case:
    logits = torch.randn(MOST + 2, VOCAB, generator=torch.Generator().manual_seed(3))
    log = SequenceLog(
        "s", (1, 2), 2, SamplingParams(**{"max_tokens": 50, "seed": 1, "temperature": 1.0} | params), ()
    )
    case = Case(log, logits)
    for _ in range(drafts):
        case = replace(case, drafts=(*case.drafts, one_by_one(case).tokens[len(case.drafts)]))
    return case


class Counting(Sampler):
    """Counts its choices."""

    chosen = 0

    def choose(self, *args: Any, **kwargs: Any) -> TokenChoices:
        self.chosen += 1
        return super().choose(*args, **kwargs)


@pytest.mark.parametrize(
    ("params", "choices"), [({}, 1), ({"logprobs": 2}, 1), ({"repetition_penalty": 1.2}, 5)]
)
def test_all_drafts_of_sequences_that_nothing_binds_take_one_choice(
    params: dict[str, Any], choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counting] = []

    def counting(*args: Any) -> Counting:
        made.append(Counting(*args))
        return made[-1]

    cases = [plain(MOST, **params), plain(2, **params, seed=7)]
    monkeypatch.setitem(globals(), "Sampler", counting)
    found, _ = all_at_once(cases, [0, 1])
    assert [outcome.accepted for outcome in found] == [MOST, 2]
    assert made[0].chosen == choices
