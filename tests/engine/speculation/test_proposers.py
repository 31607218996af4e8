"""What is guessed: from the sequence's own text, and from a prediction."""

from hypothesis import given
from hypothesis import strategies as st

from personae.engine.speculation.ngram import SIZES, NgramProposer
from personae.engine.speculation.prediction import PredictionProposer

TOKENS = st.lists(st.integers(0, 4), max_size=60)


def looked_up(tokens: list[int], most: int) -> tuple[int, ...] | None:
    """What followed the longest of SIZES last tokens where they were before, by looking everywhere."""
    for size in SIZES:
        tail = tokens[-size:]
        places = [
            end for end in range(size, len(tokens)) if len(tail) == size and tokens[end - size : end] == tail
        ]
        if places:
            again = tokens[places[-1] :]
            return tuple((again * most)[:most])
    return None


@given(pieces=st.lists(TOKENS, min_size=1, max_size=5), most=st.integers(1, 7))
def test_an_ngram_is_followed_by_what_followed_it_last(pieces: list[list[int]], most: int) -> None:
    proposer, tokens = NgramProposer(pieces[0]), [*pieces[0]]
    for piece in pieces[1:]:
        proposer.extend(piece)
        tokens += piece
    draft = proposer.propose(most)
    assert (None if draft is None else draft.tokens) == looked_up(tokens, most)
    if draft is not None:
        assert draft.match >= 1
        assert len(draft.tokens) == most


@given(tokens=TOKENS, cut=st.integers(0, 60))
def test_what_is_guessed_depends_on_the_tokens_alone(tokens: list[int], cut: int) -> None:
    pieces = NgramProposer(tokens[:cut])
    for token in tokens[cut:]:
        pieces.extend((token,))
    assert pieces.propose(7) == NgramProposer(tokens).propose(7)


def test_a_text_that_repeats_itself_goes_on_repeating_itself() -> None:
    draft = NgramProposer([9, 1, 2, 1, 2]).propose(5)
    assert draft is not None
    assert draft.tokens == (1, 2, 1, 2, 1)


def test_a_prediction_is_followed_from_its_start_and_found_again_behind_an_edit() -> None:
    proposer = PredictionProposer([1, 2, 3, 4, 5, 6, 3, 4, 7])
    first = proposer.propose(3)
    assert first is not None
    assert first.tokens == (1, 2, 3)
    proposer.extend([1, 2, 50, 51])
    assert proposer.propose(3) is None
    proposer.extend([4, 5])
    again = proposer.propose(2)
    assert again is not None
    assert again.tokens == (6, 3)
    proposer.extend([3, 4])
    later = proposer.propose(4)
    assert later is not None
    assert later.tokens == (7,)


def test_a_prediction_that_is_over_says_nothing() -> None:
    proposer = PredictionProposer([1, 2, 3])
    proposer.extend([1, 2, 3])
    assert proposer.propose(4) is None
    assert PredictionProposer([]).propose(4) is None
