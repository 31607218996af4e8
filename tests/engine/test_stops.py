import itertools

from hypothesis import given
from hypothesis import strategies as st

from personae.engine.stops import StopFinder

texts = st.text("ab ", max_size=40)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=6), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first stop string to be complete starts and ends; the longest of those that end together."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


def run(chunks: list[str], stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    finder = StopFinder(stops, include_stop)
    seen = ""
    for chunk in chunks:
        seen += finder.push(chunk)
        if finder.found is not None:
            return seen, finder.found
    return seen + finder.flush(), None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 100)), st.booleans())
def test_any_chunks_end_at_the_first_complete_stop_string(
    text: str, stops: list[str], places: list[int], include_stop: bool
) -> None:
    where = first_stop(text, stops)
    expected = text if where is None else text[: where[1] if include_stop else where[0]]
    assert run(cut(text, places), stops, include_stop) == (
        expected,
        None if where is None else text[slice(*where)],
    )


@given(texts, stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops, False)
    seen = ""
    for place, char in enumerate(text):
        seen += finder.push(char)
        if finder.found is not None:
            return
        held = text[len(seen) : place + 1]
        assert seen + held == text[: place + 1]
        may_become = [
            length
            for stop in stops
            for length in range(len(stop))
            if text[: place + 1].endswith(stop[:length])
        ]
        assert len(held) == max(may_become, default=0)


def test_without_stop_strings_text_passes_through() -> None:
    finder = StopFinder(["", ""], False)
    assert finder.push("anything") == "anything"
    assert finder.found is None


def test_a_restart_within_a_partial_match_is_not_missed() -> None:
    assert run(["aab", "aaab!"], ["aaab"], False) == ("aab", "aaab")
