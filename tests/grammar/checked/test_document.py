import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.grammar.checked.document import changes, loaded, parsed, without_repeats

TEXTS = st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
INDENTS = st.sampled_from([None, 1, 4])


@given(VALUES, INDENTS)
def test_every_value_of_a_text_is_found_where_it_is(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)

    def compare(node: Any, value: Any) -> None:
        assert json.loads(text[node.start : node.end]) == value
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for member, (step, one) in zip(node.members, inner, strict=True):
                assert member.step == step
                compare(member.node, one)

    compare(parsed(text), value)


@given(VALUES, INDENTS, st.integers(min_value=0), st.lists(TEXTS | st.integers(0, 3), max_size=3))
def test_a_change_keeps_what_is_written_and_makes_another_json_text(
    value: Any, indent: int | None, at: int, place: list[str | int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    written = at % (len(text) + 1)
    for count, changed in enumerate(changes(text, written, [place, ()], ["a", ""], ["1", '"x"', "[]"])):
        assert changed[:written] == text[:written]
        json.loads(changed)
        if count == 200:
            break


def test_changes_reach_another_value_another_member_a_new_one_and_a_longer_text() -> None:
    found = set(changes('{"a":1,"b":"x"}', 1, [()], ["c"], ["2", '"y"']))
    assert found >= {
        '{"a":2,"b":"x"}',
        '{"b":"x"}',
        '{"a":1}',
        '{"a":1,"b":"x","c":"y"}',
        '{"c":2,"a":1,"b":"x"}',
        '{"c":1,"b":"x"}',
        '{"a":1,"b":"xa"}',
        '{"a":17,"b":"x"}',
    }


def test_a_value_that_is_written_in_part_becomes_one_that_begins_alike() -> None:
    found = set(changes('["b"]', 3, [(0,)], [], ['"bc"', '"d"']))
    assert '["bc"]' in found
    assert '["d"]' not in found


def test_a_string_or_a_name_that_is_written_in_part_ends_so_that_it_matches_patterns() -> None:
    found = set(changes('{"ab":"cd"}', 3, [()], [], [], [], [("^ax+$",), ("^c.*e$",)]))
    assert '{"ax":"cd"}' in found
    assert '{"ab":"ce"}' in found
    assert not any(one.startswith('{"ce') for one in found)


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ('{"a":1,"b":2,"a":3}', 0, '{"a":1,"b":2}'),
        ('{"a":1,"b":2,"a":3}', 12, '{"a":1,"b":2}'),
        ('{"a":1,"b":2,"a":3}', 13, '{"a":1,"b":2,"a":3}'),
        ('[{"a":1,"a":{"b":1,"b":2}}, {"c":[],"c":0,"d":0}]', 2, '[{"a":1}, {"c":[],"d":0}]'),
        ('{"a":1,"a"', 0, '{"a":1,"a"'),
        ("1", 0, "1"),
    ],
)
def test_repeated_members_that_are_not_written_yet_are_left_out(
    text: str, written: int, expected: str
) -> None:
    assert without_repeats(text, written) == expected


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', "[1", "", "[" * 100_000])
def test_a_name_that_comes_twice_and_what_is_not_json_is_no_value(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        loaded(text)
