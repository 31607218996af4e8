"""Answers of chat shape: what walks over their grammars write, and what parsers read from it."""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from grammar_walks import allowed_tokens
from hypothesis.errors import UnsatisfiedAssumption
from sandbox_limits import PATIENT

from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import Matcher
from personae.grammar.reasoning.format import Thinks
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.parser import AnswerParser, ParsedPieces, TextPiece
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.function import Function
from personae.grammar.vocabulary import Vocabulary

STOP = 256
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
    param="tools[0].function.parameters",
)
CLOCK = Function("get", {"type": "object"}, strict=False, param="tools[1].function.parameters")
FUNCTIONS = (WEATHER, CLOCK)


@cache
def vocabulary(special: tuple[str, ...] = (), plain: tuple[bytes, ...] = ()) -> Vocabulary:
    """One token per byte, a stop token (256), the special tokens, and tokens of several bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * (1 + len(special))
    tokens += plain
    ids = {name: STOP + 1 + index for index, name in enumerate(special)}
    return Vocabulary((*tokens, *[b""] * 7), (STOP,), ids)


@cache
def _compiled(special: tuple[str, ...], plain: tuple[bytes, ...], spec: GrammarSpec) -> BudgetGrammar:
    return GrammarCompiler(vocabulary(special, plain), limits=PATIENT).compile_here(spec)


def matcher_of(shape: AnswerShape, vocabulary: Vocabulary) -> Matcher:
    """A matcher at the start of the shape's grammar."""
    spec = shape.spec()
    assert spec is not None
    plain = tuple(text for text in vocabulary.tokens[256:] if text)
    return _compiled(tuple(vocabulary.special), plain, spec).matcher()


def encode(text: str, vocabulary: Vocabulary) -> list[int]:
    """Encode a text with one token per byte, except for the names of special tokens."""
    ids: list[int] = []
    while text:
        name = next((name for name in vocabulary.special if text.startswith(name)), None)
        if name is None:
            ids += text[0].encode()
            text = text[1:]
        else:
            ids.append(vocabulary.special[name])
            text = text.removeprefix(name)
    return ids


def allows(shape: AnswerShape, text: str, vocabulary: Vocabulary) -> bool:
    """Whether the grammar of `shape` allows `text` as a complete answer."""
    matcher = matcher_of(shape, vocabulary)
    for token in [*encode(text, vocabulary), STOP]:
        allowed = token in allowed_tokens(matcher, vocabulary)
        assert matcher.accept(token) == allowed, "the mask says something else than the matcher"
        if not allowed:
            return False
    return True


def random_answer(shape: AnswerShape, vocabulary: Vocabulary, seed: int, budget: int = 30) -> list[int]:
    """The tokens of an answer by a model that chooses at random among those that the grammar allows.

    It knows the tags of its format, and also writes them where they do not belong. After `budget` tokens it
    tends to end.
    """
    rng = random.Random(seed)
    matcher = matcher_of(shape, vocabulary)
    tags = [shape.reasoning.close] if shape.reasoning is not None else []
    if shape.tools is not None:
        tags += [shape.tools.trigger, shape.tools.close]
        if isinstance(shape.tools.arguments, KeyedArguments):
            tags += [shape.tools.arguments.after_value, shape.tools.arguments.quote]
    tags = [tag.strip() for tag in tags if tag.strip()]
    ending = {STOP, *vocabulary.special.values()}
    ids: list[int] = []
    plan: list[int] = []
    for step in range(100 * budget):
        tokens = allowed_tokens(matcher, vocabulary)
        assert tokens, f"nothing is allowed after {ids}"
        late = step > budget
        if not plan and rng.random() < (0.3 if late else 0.05):
            tag = rng.choice(tags)
            plan = encode(tag, vocabulary) if rng.random() < 0.5 else list(tag.encode())
        if plan and plan[0] in tokens:
            token = plan.pop(0)
        else:
            plan = []
            closing = sorted({*b'"}]>'} & set(tokens))
            pool = [token for token in tokens if token in ending] or closing if late else []
            token = rng.choice(pool or tokens)
        assert matcher.accept(token)
        if matcher.terminated:
            return ids
        ids.append(token)
    raise UnsatisfiedAssumption("it wandered for ever, which is allowed and shows nothing")


@dataclass
class Parsed:
    """Everything that a parser returned for an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    completed: int = 0

    def add(self, said: ParsedPieces) -> None:
        for piece in said.pieces:
            if isinstance(piece, TextPiece):
                self.reasoning += piece.text * piece.reasoning
                self.content += piece.text * (not piece.reasoning)
                continue
            if piece.name is not None:
                assert piece.index == len(self.calls)
                self.calls.append([piece.name, ""])
            self.calls[piece.index][1] += piece.arguments

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        """The calls with their arguments decoded."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def marked(ids: Iterable[int], vocabulary: Vocabulary, parser: AnswerParser) -> str:
    """The text that a parser gets for tokens: special tokens that it knows become marks."""
    text = ""
    run = b""
    for token in ids:
        mark = parser.marks.of(token)
        if mark is None:
            run += vocabulary.tokens[token]
        else:
            text += run.decode(errors="replace") + mark
            run = b""
    return text + run.decode(errors="replace")


def parse(
    shape: AnswerShape, text: str, special: Mapping[str, int] | None = None, cuts: Sequence[int] = ()
) -> Parsed:
    """Return what the parser of `shape` reads from a text, given in pieces cut at these places."""
    parser = shape.parser(special or {})
    text = parser.marks.put(text)
    return parse_marked(parser, text, cuts)


def parse_marked(parser: AnswerParser, text: str, cuts: Sequence[int] = ()) -> Parsed:
    """Like `parse`, for a text with marks in it."""
    parsed = Parsed()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in pairwise(places):
        parsed.add(parser.push(text[start:end]))
    parsed.add(parser.finish())
    parsed.completed = parser.completed
    return parsed


def written(shape: AnswerShape, parsed: Parsed, parser: AnswerParser) -> str:
    """Return an answer that a parser would read like this, with marks for special tokens."""
    put = parser.marks.put
    text = ""
    format = shape.reasoning
    if format is not None and shape.thinks is Thinks.OPEN:
        text += parsed.reasoning + put(format.close + format.joint)
        if parsed.calls and format.aside and parsed.content:
            text += put(format.aside) + parsed.content + put(format.close + format.joint)
        elif not parsed.calls:
            text += put(format.text)
    if format is None or not format.aside or not parsed.calls:
        text += parsed.content
    if parsed.calls and (tools := shape.tools) is not None:
        calls = [_call(shape, name, arguments, put) for name, arguments in parsed.calls]
        text += put(tools.open) + put(tools.between).join(calls) + put(tools.close)
    return text


def _call(shape: AnswerShape, name: str, arguments: str, put: Callable[[str], str]) -> str:
    tools = shape.tools
    assert tools is not None
    style = tools.arguments
    if isinstance(style, KeyedArguments):
        function = next(function for function in shape.functions if function.name == name)
        pairs = []
        for key, value in json.loads(arguments).items():
            text = json.dumps(value, ensure_ascii=False)
            text = style.constants.get(text, text)
            if isinstance(value, str) and style.kind(function, key) != "json":
                text = value
            elif isinstance(value, str) and style.quote:
                text = put(style.quote) + value + put(style.quote)
            pairs.append(put(style.before_key) + key + put(style.after_key) + text + put(style.after_value))
        arguments = put(style.between).join(pairs)
    after_name = put(tools.after_name).replace("#", "7")
    return put(tools.before_name) + name + after_name + arguments + put(tools.after_arguments)


def without_blanks(text: str) -> str:
    return "".join(text.split())
