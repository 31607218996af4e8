"""What is found in JSON text before it is decoded."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.api.wire.json_scan import MOST_CONTAINERS, MOST_VALUES, check_keys, check_long_json
from personae.errors import PayloadTooLarge, RequestError

KEY = st.sampled_from(["a", "b", "é", 'q"', "back\\", ":", "{", "", "a\nb"])
VALUE = st.recursive(
    st.none() | st.integers() | KEY,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEY, inner), max_size=4).map(tuple),
    max_leaves=20,
)


def written(value: Any, gap: str, ascii: bool) -> str:
    """JSON in which a tuple of pairs is an object, keys repeated as they are."""
    if isinstance(value, tuple):
        pairs = (
            f"{json.dumps(key, ensure_ascii=ascii)}{gap}:{gap}{written(one, gap, ascii)}"
            for key, one in value
        )
        return "{" + f"{gap},{gap}".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(written(one, gap, ascii) for one in value) + "]"
    return json.dumps(value, ensure_ascii=ascii)


def repeats(value: Any) -> bool:
    if isinstance(value, tuple):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(repeats(one) for _, one in value)
    return isinstance(value, list) and any(map(repeats, value))


@settings(max_examples=300, deadline=None)
@given(value=VALUE, gap=st.sampled_from(["", " ", "\n\t "]), ascii=st.booleans())
def test_both_ways_find_a_repeated_key_and_nothing_else(value: Any, gap: str, ascii: bool) -> None:
    text = written(value, gap, ascii).encode()
    for check in (check_keys, check_long_json):
        if repeats(value):
            with pytest.raises(RequestError) as refused:
                check(text)
            assert refused.value.code == "duplicate_parameter"
        else:
            check(text)


@pytest.mark.parametrize("check", [check_keys, check_long_json])
def test_a_key_that_is_spelled_in_two_ways_is_the_same_key(check: Any) -> None:
    with pytest.raises(RequestError, match="`ab` is given twice") as refused:
        check(rb'{"ab": 1, "c": {"ab": 2}, "a\u0062": 3}')
    assert refused.value.param == "ab"


@pytest.mark.parametrize(
    "text", [b"", b'"', b'{"a', b'{"a\\"', b"}}", b'{"a":1}}{"a":1}', b"\xff{", b'{"\\q":1}']
)
def test_what_is_no_json_is_left_to_the_decoder(text: bytes) -> None:
    check_keys(text)
    check_long_json(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"1," * (MOST_VALUES + 1) + b"1]",
        b"[" + b"[]," * (MOST_CONTAINERS + 1) + b"1]",
        b'["' + b'","' * MOST_VALUES + b'"]',
        b"{" + b",".join(b'"%d":1' % n for n in range(MOST_CONTAINERS + 1)) + b"}",
    ],
    ids=["numbers", "arrays", "strings", "members"],
)
def test_more_values_than_are_taken_are_refused(text: bytes) -> None:
    with pytest.raises(PayloadTooLarge):
        check_long_json(text)


def test_marks_within_text_are_no_values() -> None:
    check_long_json(json.dumps({"prompt": "[{,:}]" * 300_000, "n": [1, 2]}).encode())
