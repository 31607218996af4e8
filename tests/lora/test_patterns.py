"""Module patterns mean what PEFT means by them, and take no more time than a stranger may have."""

import re
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from personae.errors import AdapterError
from personae.lora import patterns
from personae.lora.patterns import MAX_PATTERN, ModulePatterns, NamePattern

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
def test_a_pattern_agrees_with_re_on_every_regular_expression(key: str, names: list[str]) -> None:
    try:
        pattern = NamePattern(key)
    except AdapterError:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((re.error, Warning)):
                re.compile(key)
        return
    for name in names:
        assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name)), name
        assert pattern.matches_whole(name) == bool(re.fullmatch(key, name)), name


@pytest.mark.parametrize(
    "key",
    [
        "(q",
        "q)",
        "*q",
        "q**",
        "[z-a]",
        "[[a]]",
        "q(?i)",
        "q\n",
        "é",
        "q{e<=1}",
        r"\p{L}",
        "q{1001}",
        "(q{9}){999}",
    ],
)
def test_a_key_that_peft_cannot_read_or_that_reads_two_ways_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdapterError, match="alpha_pattern") as refused:
        ModulePatterns("alpha_pattern", {key: 1})
    assert refused.value.param == "alpha_pattern"


@pytest.mark.parametrize("key", ["(a+)+b", "(a|a)*b", "((((a*)*)*)*)*b", "(a?)" * 20 + "a" * 20 + "b"])
def test_a_key_over_which_re_backtracks_for_years_is_answered_or_refused_in_time(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.05)
    ranks = ModulePatterns("rank_pattern", {key: 1})
    begun = time.thread_time()
    outcome: object
    try:
        outcome = ranks.get("a" * 60, 9)
    except AdapterError as refused:
        outcome = refused.param
    assert outcome in (9, "rank_pattern")
    assert time.thread_time() - begun < 5


def test_a_key_that_takes_too_long_is_refused_by_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.05)
    ranks = ModulePatterns("rank_pattern", {"(a|aa|aaa)+b(?=c)c?d": 1})
    with pytest.raises(AdapterError, match="takes too long to match") as refused:
        ranks.get("a" * 400, 9)
    assert refused.value.param == "rank_pattern"


def test_keys_are_bounded_in_length() -> None:
    with pytest.raises(AdapterError, match="longer"):
        ModulePatterns("rank_pattern", {"q" * (MAX_PATTERN + 1): 1})
    with pytest.raises(AdapterError, match="unterminated"):
        ModulePatterns("rank_pattern", {"(" * MAX_PATTERN: 1})
    ModulePatterns("rank_pattern", dict.fromkeys(NAMES * 40, 1))


def test_keys_are_bounded_in_number() -> None:
    with pytest.raises(AdapterError, match="more than 4096 keys"):
        ModulePatterns("rank_pattern", {f"layer{number}": 1 for number in range(4097)})
