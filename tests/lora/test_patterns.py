"""Module patterns mean what PEFT means by them, and take no more time than a stranger may have."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from personae.errors import AdapterError
from personae.lora import patterns
from personae.lora.patterns import MAX_GENERAL, MAX_PATTERN, Automaton, ModulePatterns

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 2, 10, 11)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]
KEYS = [
    "q_proj",
    "proj",
    "self_attn.q_proj",
    "^q_proj",
    "^model.layers.0.mlp.up_proj",
    "model.layers.1.self_attn.q_proj$",
    r"layers\.1\.self_attn\.v_proj",
    "layers.1.mlp.up_proj",
    "mlp..._proj",
    r".*\.(0|1)\..*",
    r".*layers\.1\d?\.self_attn\.[qv]_proj",
    r"(?:q|v)_proj|mlp\.down_proj",
    r"layers\.[^0-1]\..*",
    r"([0-9]+\.)?self_attn\.(q_proj)",
    "(((q|v)_proj)?)*",
    r"layers\.\d{1,2}\.mlp\.(up_|down_){1}proj",
    r"model\.layers\.[\d]{2,}\..*",
    r".*(?:_[a-z]{4}){1,}",
    r".*\bself_attn\b.*",
    r"(?!.*mlp).*_proj",
    r"(?:.*\.)?(?=q|v).{6}",
    r"((?!self_attn).)*",
    "",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_selects_the_modules_that_peft_selects(key: str) -> None:
    ranks = ModulePatterns("rank_pattern", {key: 5})
    for name in NAMES:
        assert ranks.get(name, 9) == {key: 5}.get(get_pattern_key([key], name), 9)


def test_the_first_key_that_matches_wins() -> None:
    ranks = ModulePatterns("rank_pattern", {"layers.1.self_attn.q_proj": 2, "q_proj": 3, ".*proj": 4})
    values = [ranks.get(f"model.layers.{end}", 1) for end in ("1.self_attn.q_proj", "0.self_attn.q_proj")]
    assert values == [2, 3]
    assert ranks.get("model.layers.0.mlp.up_proj", 1) == 4
    assert ranks.get("lm_head", 1) == 1


@st.composite
def regexes(draw: st.DrawFn) -> str:
    atoms = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", "^", "$", r"\b", r"\w"])
    inner = st.recursive(
        atoms,
        lambda deeper: st.one_of(
            st.lists(deeper, min_size=1, max_size=3).map("".join),
            st.lists(deeper, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
            st.tuples(deeper, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,}", "{0,2}?", "{0}"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
            deeper.map(lambda ahead: f"(?={ahead})"),
            deeper.map(lambda ahead: f"(?!{ahead})"),
        ),
        max_leaves=6,
    )
    return draw(inner)


@given(regexes(), st.lists(st.text("ab.", max_size=6), max_size=8))
def test_the_automaton_agrees_with_re_on_every_regular_expression(key: str, names: list[str]) -> None:
    automaton = Automaton(key)
    for name in names:
        assert automaton.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name)), name
        assert automaton.matches_whole(name) == bool(re.fullmatch(key, name)), name


@pytest.mark.parametrize(
    "key",
    [
        "(?<=q)_proj",
        r"(q)\1",
        "q{33}",
        "q{2,1}",
        "q{,2}",
        "(?=q)*",
        "(q",
        "q)",
        "*q",
        "q**",
        "^*",
        "[z-a]",
        "[[a]]",
        "(?i)q",
        "q\n",
        "é",
    ],
)
def test_a_key_outside_the_language_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdapterError, match="alpha_pattern") as refused:
        ModulePatterns("alpha_pattern", {key: 1})
    assert refused.value.param == "alpha_pattern"


@pytest.mark.parametrize(
    "key",
    ["(a+)+b", "(a|a)*b", "((((a*)*)*)*)*b", "(a?)" * 25 + "a" * 25 + "b", "(" * 30 + "a" + ")*" * 30 + "b"],
)
def test_a_key_over_which_re_backtracks_for_years_is_answered(key: str) -> None:
    assert not Automaton(key).matches("a" * 60)
    assert Automaton(key).matches("a" * 60 + "b") == (key.count("a?") == 0)


def test_an_expression_that_would_take_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_WORK", 10_000)
    costly = Automaton("(?=.*(?!.*(?=.*a)).*b)" * 20)
    with pytest.raises(AdapterError, match="too long to match"):
        costly.matches("b" * 60)
    with pytest.raises(AdapterError, match="too large"):
        Automaton("(((a{32}){32}){32}){32}")


def test_keys_are_bounded_in_length_and_in_sum() -> None:
    with pytest.raises(AdapterError, match="longer"):
        ModulePatterns("rank_pattern", {"q" * (MAX_PATTERN + 1): 1})
    with pytest.raises(AdapterError, match="write out"):
        ModulePatterns("rank_pattern", {f"(q|{i:060})": 1 for i in range(MAX_GENERAL // 60 + 1)})
    with pytest.raises(AdapterError, match="parenthesis"):
        ModulePatterns("rank_pattern", {"(" * MAX_PATTERN: 1})
    ModulePatterns("rank_pattern", dict.fromkeys(NAMES * 40, 1))


def test_keys_are_bounded_in_number() -> None:
    with pytest.raises(AdapterError, match="more than 4096 keys"):
        ModulePatterns("rank_pattern", {f"layer{number}": 1 for number in range(4097)})
