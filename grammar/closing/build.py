"""From a spec, as a backend takes it, to a grammar whose answers close."""

import json
import re

import msgspec

from personae.grammar.backend import CompiledGrammar, GrammarBackend
from personae.grammar.closing.grammar import ClosingGrammar
from personae.grammar.closing.reach import Reach, pattern_bound, schema_reach, text_reach
from personae.grammar.closing.table import TokenTable
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Exactly,
    Json,
    OneOf,
    Repeat,
    Sequence,
    Text,
    Until,
)

_TOKEN_ID = re.compile(r"<\[")  # tokens named by their id, which the bytewise vocabulary does not have


def close(
    spec: GrammarSpec, backend: GrammarBackend, bytewise: GrammarBackend, table: TokenTable
) -> ClosingGrammar:
    """Compile `spec`, of any kind but "structure", twice: over the model's tokens and over bytes.

    Raises GrammarError when it cannot be compiled.
    """
    inner = backend.compile(spec)
    second: CompiledGrammar | None = None
    if spec.kind != "lark" or not _TOKEN_ID.search(spec.source):
        second = bytewise.compile(spec)
    return ClosingGrammar(inner, second, table, reach_of(spec, table))


def reach_of(spec: GrammarSpec, table: TokenTable) -> Reach | None:
    """The bounds of a spec's answers; None where they are not known."""
    match spec.kind:
        case "json_object":
            return schema_reach({"type": "object"})
        case "json_schema":
            try:
                return schema_reach(json.loads(spec.source))
            except ANALYSIS_ERRORS:
                return None
        case "regex":
            return pattern_bound(spec.source)
        case "choice":
            choices = [choice.encode() for choice in json.loads(spec.source)]
            choices.sort(key=lambda choice: (len(table.spell_shortest(choice) or choice), choice))
            longest = max(map(len, choices), default=0)
            return Reach(longest, plain=None, hints=tuple(choices), words_first=True)
    return None


def structure_reach(element: Element) -> Reach:
    """The bounds of the answers of a structure whose schemas are those that are enforced."""
    match element:
        case Exactly(text=text):
            return text_reach([text])
        case Text(without=without, openings=openings):
            return text_reach([], barred=(*without, *openings))
        case Until(end=end, openings=openings):
            return text_reach([], [end], barred=openings)
        case Json(schema=schema):
            reach = schema_reach(schema)
            return msgspec.structs.replace(reach, rest=reach.rest + reach.container + reach.lexeme)
        case Sequence(parts=parts):
            total = Reach()
            for part in parts:
                total = total.then(structure_reach(part))
            return total
        case OneOf(parts=parts):
            total = Reach()
            for part in parts:
                total = total.beside(structure_reach(part))
            return total
        case Repeat(part=part, least=least):
            once = structure_reach(part)
            return msgspec.structs.replace(once, rest=once.rest * max(least, 1))
