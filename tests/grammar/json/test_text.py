import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.grammar.json.text import NotJson, Text

TEXTS = st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 5))
def test_a_text_that_grows_becomes_the_value_that_it_writes(
    value: Any, indent: int | None, escaped: bool, size: int
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=escaped and "\\ud" not in json.dumps(value))
    text = Text()
    for place in range(0, len(written), size):
        fork = text.fork()
        assert fork.feed(written[place : place + size]).at == text.fork().feed(written[place:][:size]).at
        text.feed(written[place : place + size])
    whole = text.end()
    assert whole is not None
    assert whole.loaded() == value


@given(VALUES, st.integers(0))
def test_a_fork_goes_on_alone(value: Any, at: int) -> None:
    written = json.dumps([value, value], ensure_ascii=False)
    begun = Text(written[: at % len(written)])
    before, one, other = repr_of(begun), begun.fork(), begun.fork()
    one.feed(written[at % len(written) :])
    assert repr_of(begun) == repr_of(other) == before
    whole = other.feed(written[at % len(written) :]).end()
    assert whole is not None
    assert whole.loaded() == [value, value]


def repr_of(text: Text) -> Any:
    return text.at, text.escape, [(one.kind, one.text, one.name, len(one.items)) for one in text.stack]


@pytest.mark.parametrize(
    "text",
    [
        "[1,]",
        '{"a":1,}',
        '{"a":1,"a":2}',
        "01",
        "-a",
        "1.e",
        "tru]",
        "nul ",
        "[1 2]",
        '"\x01"',
        "{1:2}",
        "1 2",
        '"\\x"',
        '"\\u00gg"',
        ".5",
        "1e]",
        "]",
        "[}",
        '{"a" 1}',
        "[,",
    ],
)
def test_a_text_that_begins_no_json_is_noticed_where_it_goes_wrong(text: str) -> None:
    with pytest.raises(NotJson):
        Text(text)


@pytest.mark.parametrize("text", ["", "[", '{"a"', '"\\u12', "1e", "-", "tru", '{"a":1', " "])
def test_a_begun_text_has_no_value_yet(text: str) -> None:
    assert Text(text).end() is None
