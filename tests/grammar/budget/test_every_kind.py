"""Answers of every kind of grammar close, or the grammar is refused: none is merely bound."""

import json

import pytest
from answers import FUNCTIONS
from grammar_walks import allowed_tokens
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.tools.registry import tool_format

VOCABULARY = text_vocabulary(("<mark>",))
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|return|>", "<|call|>")
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "s": {"type": "string"}},
    "required": ["x", "s"],
    "additionalProperties": False,
}
PATTERNS = (
    r"^[a-z]+/[a-z0-9.+-]+(;\s*charset=[a-z0-9-]+)?$",
    r"^(a|b)*abb(c|d)+xyz$",
    r"^\d+ (days?|weeks?) ago$",
    r"^[^/]+/[^/]+$",
    r"^.*foo.*bar.*baz.*$",
)
KINDS = {
    **{
        f"string {pattern}": GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": pattern}))
        for pattern in PATTERNS
    },
    "expression": GrammarSpec("regex", r"SELECT [a-z]+(, [a-z]+)* FROM [a-z]+( WHERE [a-z]+ = '[^']*')?;"),
    "words in turn": GrammarSpec("lark", 'start: "begin" (/[a-z]+/ " ")+ "end"\n'),
    "repetitions": GrammarSpec("lark", 'start: /[0-9a-f]+/ "z" /(ab)+/ "!"\n'),
    "statements": GrammarSpec(
        "lark",
        'start: stmt+ "END"\n'
        'stmt: "let " /[a-z]+/ " = " /[0-9]+/ "\\n" | "if " /[a-z]+/ " {\\n" stmt+ "}\\n"\n',
    ),
    "equations": GrammarSpec(
        "ebnf",
        'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
        'term ::= num | "(" expr ")"\nnum ::= [0-9]+\n',
    ),
    "list": GrammarSpec("ebnf", 'root ::= "- " item ("\\n- " item)* "\\n\\nEND"\nitem ::= [^\\n]+\n'),
    "a special token by its id": GrammarSpec("lark", 'start: /[a-z]+/ <[257]> "end"\n'),
}


DEEP = ">" * 64
FAR = {
    "ebnf": GrammarSpec("ebnf", f'root ::= "<" root "{DEEP}" | "."'),
    "lark": GrammarSpec("lark", f'start: "<" start "{DEEP}" | "."'),
    "patterns together": GrammarSpec(
        "json_schema",
        json.dumps(
            {
                "type": "string",
                "minLength": 10,
                "maxLength": 9000,
                "allOf": [{"pattern": p} for p in (".*1.*2", "[aA][12].*[zZ]", "[0-9][0-9]", "ab1|b12|bc1")],
            }
        ),
    ),
}


def check(grammar: object, vocabulary, spares: tuple[int, ...] = (0, 30)) -> None:
    assert isinstance(grammar, BudgetGrammar)
    for spare in spares:
        for taste in ("long", "digits"):
            budget = grammar.shortest + spare
            ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, spare)
            plain = grammar.matcher()
            assert plain.feed(ids) == len(ids)
            assert plain.accept(256), (taste, spare, text_of(ids, vocabulary)[-60:])


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_any_kind_of_grammar_is_whole_within_its_budget(kind: str) -> None:
    check(COMPILER.compile(KINDS[kind]), VOCABULARY)


@pytest.mark.parametrize("budget", [300, 2000])
@pytest.mark.parametrize("kind", FAR)
def test_an_answer_that_leads_far_from_its_end_closes_as_well(kind: str, budget: int) -> None:
    """Each token adds 64 to what is left to be written; or the backend gives up in the middle."""
    grammar = COMPILER.compile(FAR[kind])
    matcher = grammar.matcher(budget)
    ids = answer(matcher, VOCABULARY, lambda text: 10 * text.count(b"<") - len(text), budget, 1)
    assert matcher.accept(256), text_of(ids, VOCABULARY)[-60:]
    text = text_of(ids, VOCABULARY)
    assert text.count(b"<") * 64 == text.count(b">") or kind == "patterns together"


@pytest.mark.parametrize("thinks", list(Thinks))
@pytest.mark.parametrize("special", [(), CHANNELS], ids=["spelled", "tokens"])
def test_harmony_closes_with_a_schema_and_with_calls(special: tuple[str, ...], thinks: Thinks) -> None:
    vocabulary = text_vocabulary(special)
    compiler = GrammarCompiler(vocabulary, sandboxed=False)
    harmony, tools = reasoning_format("harmony"), tool_format("harmony")
    content = Json(SCHEMA, True, "schema")
    for shape in (
        AnswerShape(harmony, thinks, content=content),
        AnswerShape(harmony, thinks, tools=tools, functions=FUNCTIONS, use="required"),
    ):
        spec = shape.spec()
        assert spec is not None
        check(compiler.compile(spec), vocabulary, (3, 200))


def test_a_grammar_that_names_other_tokens_by_their_ids_is_refused_by_its_field() -> None:
    with pytest.raises(GrammarError, match=r"<\[97\]> names tokens that are not special") as refused:
        COMPILER.compile(GrammarSpec("lark", "start: <[97]>"))
    assert refused.value.param == "structured_outputs.grammar"


def test_an_answer_that_is_not_whole_at_its_last_token_has_none() -> None:
    grammar = COMPILER.compile(GrammarSpec("lark", 'start: "begin" (/[a-z]+/ " ")+ "end"\n'))
    matcher = grammar.matcher(grammar.shortest)
    for byte in b"begin" + b"a" * (grammar.shortest - 6):  # what nobody who asks would take
        assert matcher.accept(byte)
    assert allowed_tokens(matcher, VOCABULARY) == []
