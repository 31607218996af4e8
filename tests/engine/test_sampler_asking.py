"""A row's token is verified before it is taken; a vetoed one is chosen again."""

from collections import Counter

import numpy as np
import torch

from personae.engine.params import SamplingParams
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog
from personae.grammar.bitmask import Bitmask
from personae.grammar.matcher import Binding, Words

LOGITS = torch.tensor([0.5, 2.0, 1.5, 1.0, -0.5])


class Objector(Binding):
    """Leaves out the tokens `against`, one at a time or all of them `together`, at most so many `times`."""

    def __init__(self, *against: int, together: bool = False, times: int = 9) -> None:
        self._against = against
        self._together = together
        self._times = times
        self.asked: list[int] = []

    def fill(self, bitmask: Bitmask, row: int) -> None:
        raise AssertionError("its mask is in the test")

    def accept(self, token: int) -> bool:
        raise AssertionError("no token is final")

    def veto(self, token: int) -> Words | None:
        self.asked.append(token)
        if token not in self._against or len(self.asked) > self._times:
            return None
        left_out = self._against if self._together else (token,)
        return np.array([sum(1 << one for one in left_out)], np.uint32)


def mask(rows: int) -> torch.Tensor:
    return torch.full((rows, 1), -1, dtype=torch.int32)


def sampler(*rows: SamplingParams, newest: torch.Tensor | None = None) -> Sampler:
    """`newest` gets the tokens that are final, by slot."""
    newest = torch.zeros(len(rows), dtype=torch.int64) if newest is None else newest
    found = Sampler(len(rows), len(LOGITS), "cpu", newest.__setitem__)
    for slot, params in enumerate(rows):
        found.admit(slot, SequenceLog("s", (0,), 1, params, ()))
    return found


def ask(objector: Objector, *rows: SamplingParams) -> TokenChoices:
    """One step of a fresh sampler, in which the first row's token is asked about."""
    count = len(rows)
    return (
        sampler(*rows)
        .sample(LOGITS.repeat(count, 1), range(count), [1] * count, mask(count), {0: objector})
        .read()
    )


def greedy(**params: float) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=0.0, seed=0, **params)


def test_the_best_token_without_a_veto_is_taken() -> None:
    objector = Objector(1, 2)
    choices = ask(objector, greedy())
    assert choices.tokens == [3]
    assert objector.asked == [1, 2, 3]


def test_a_veto_may_leave_out_many_tokens_at_once() -> None:
    objector = Objector(1, 2, 3, together=True)
    assert ask(objector, greedy()).tokens == [0]
    assert objector.asked == [1, 0]


def test_a_row_with_objections_to_everything_fails_and_no_other_notices() -> None:
    choices = ask(Objector(0, 1, 2, 4, together=True), greedy(), greedy())
    assert choices.tokens == [3, 1]
    everything = Objector(0, 1, 2, 3, 4, together=True, times=1)
    failed = ask(everything, greedy(), greedy())
    assert failed.tokens == [None, 1]
    assert set(failed.failures) == {0}


def test_a_row_that_fails_is_not_asked() -> None:
    """It has no token. Who objects to the one in its place would be asked forever."""
    logits = LOGITS.repeat(2, 1)
    logits[0, 0] = torch.nan
    objector = Objector(0, 1, 2, 3, 4)
    read = sampler(greedy(), greedy()).sample(logits, [0, 1], [1, 1], mask(2), {0: objector}).read()
    assert read.tokens == [None, 1]
    assert objector.asked == []
    left_without = Objector(0, 1, 2, 3, 4, times=99)
    assert ask(left_without, greedy()).tokens == [None]
    assert left_without.asked == [1, 2, 3, 0, 4]


def test_what_is_chosen_again_is_chosen_as_if_the_refused_had_never_been_there() -> None:
    """Against the probabilities: 6,000 draws, so that a share is good to about 0.02 (three deviations)."""
    drawing = sampler(SamplingParams(max_tokens=10_000, temperature=1.0, seed=7))
    draws = 6000
    counts = Counter(
        drawing.sample(LOGITS[None].clone(), [0], [position], mask(1), {0: Objector(1, 3)}).read().tokens[0]
        for position in range(1, draws + 1)
    )
    left = LOGITS.clone()
    left[[1, 3]] = -torch.inf
    for token, share in enumerate(left.softmax(0).tolist()):
        assert abs(counts[token] / draws - share) < 0.02


def test_nothing_is_final_before_everybody_has_been_asked() -> None:
    objector = Objector(1)
    newest = torch.zeros(2, dtype=torch.int64)
    found = sampler(greedy(), greedy(), newest=newest)
    sampled = found.sample(LOGITS.repeat(2, 1), [0, 1], [1, 1], mask(2), {0: objector})
    assert objector.asked == []
    sampled.settle()
    assert objector.asked == [1, 2]
    assert newest.tolist() == [2, 1]
    assert sampled.read().tokens == [2, 1]
    assert objector.asked == [1, 2], "once"


def test_rows_that_are_chosen_again_together_are_chosen_as_if_alone() -> None:
    rows = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed) for seed in range(8)]
    chosen = (
        sampler(*rows)
        .sample(LOGITS.repeat(8, 1), range(8), [1] * 8, mask(8), {row: Objector(1, 2) for row in range(8)})
        .read()
        .tokens
    )
    assert chosen == [ask(Objector(1, 2), row).tokens[0] for row in rows]


def test_the_penalties_count_the_token_that_was_taken() -> None:
    newest = torch.zeros(1, dtype=torch.int64)
    found = sampler(greedy(presence_penalty=2.0), newest=newest)
    assert found.sample(LOGITS[None].clone(), [0], [1], mask(1), {0: Objector(1)}).read().tokens == [2]
    assert found.sample(LOGITS[None].clone(), [0], [2]).read().tokens == [1]
    assert newest.tolist() == [1]


def test_logprobs_are_those_of_the_token_that_was_taken() -> None:
    choices = (
        sampler(greedy(logprobs=1)).sample(LOGITS[None].clone(), [0], [1], mask(1), {0: Objector(1)}).read()
    )
    assert choices.logprobs[0].token == 2
    assert abs(choices.logprobs[0].logprob - LOGITS.log_softmax(0)[2].item()) < 1e-6


def test_rows_that_are_not_asked_in_time_have_no_token_and_are_the_first_to_be_asked_next_time() -> None:
    newest = torch.zeros(4, dtype=torch.int64)
    found = sampler(greedy(), greedy(), greedy(), greedy(), newest=newest)
    found.sample(torch.eye(5)[4].repeat(4, 1), range(4), [0] * 4, mask(4)).settle()
    found.ask_patience = 0.0  # one search, whatever it takes
    asked = {row: Objector() for row in (0, 1, 3)}
    first = found.sample(LOGITS.repeat(4, 1), range(4), [1] * 4, mask(4), asked).read()
    assert first.tokens == [1, None, 1, None]
    assert first.undecided == {1, 3}
    assert not first.failures
    assert newest.tolist() == [1, 4, 1, 4], "they are computed again from the token before"
    second = found.sample(LOGITS.repeat(4, 1), range(4), [2, 1, 2, 1], mask(4), asked).read()
    assert second.tokens == [None, 1, 1, None]


def test_a_row_that_goes_on_asking_chooses_what_it_would_have_chosen_at_once() -> None:
    class Repeats(Objector):
        """Says again what it has said."""

        def __init__(self, *against: int) -> None:
            super().__init__(*against)
            self._said: dict[int, Words | None] = {}

        def veto(self, token: int) -> Words | None:
            if token not in self._said:
                self._said[token] = super().veto(token)
            return self._said[token]

    found, objector = sampler(greedy()), Repeats(1, 2)
    found.ask_patience = 0.0
    tokens = []
    while tokens[-1:] != [3]:
        tokens += found.sample(LOGITS[None].clone(), [0], [1], mask(1), {0: objector}).read().tokens
        found.ask_patience += 0.001 * (len(tokens) > 2)
        assert len(tokens) < 99
    assert set(tokens[:-1]) <= {None}
    assert objector.asked == [1, 2, 3]
