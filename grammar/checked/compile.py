"""Compiles what no grammar enforces completely: a looser grammar, and what binds its answers beyond it."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

import msgspec
from msgspec.structs import replace

from personae.errors import GrammarError
from personae.grammar.backend import CompiledGrammar, GrammarBackend
from personae.grammar.backends.llguidance_text import keeps_order
from personae.grammar.budget.build import analysis_of
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.table import STOP, TokenTable
from personae.grammar.checked.answers import Answers
from personae.grammar.checked.grammar import CheckedGrammar, checked
from personae.grammar.checked.parts import PartSchema
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, parse_schema
from personae.grammar.schema.prepare import ANALYSIS_ERRORS, check_answerable, loose, without_ignored
from personae.grammar.schema.references import resolved
from personae.grammar.schema.spelling import check_spelling
from personae.grammar.schema.walk import subschemas
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Json,
    Lark,
    Regex,
    decode_structure,
    replace_bound,
    structure_spec,
)

_BACKEND = "llguidance"
_MOST_REORDERED = 20_000  # characters of a schema of which forms without its order are looked for

Looser = Callable[[Schema], Iterable[Schema]]


class Loosening:
    """Loosens JSON parts. `looser` gives schemas that bind less and less of one; `bytewise` is the backend
    over pieces."""

    def __init__(self, looser: Looser, bytewise: GrammarBackend, table: TokenTable) -> None:
        self._looser = looser
        self._bytewise = bytewise
        self._table = table
        self._known: dict[bytes, tuple[Json, PartSchema]] = {}

    def answers(self, whole: Element, needs: Callable[[Json], bool]) -> tuple[Element, Answers]:
        """The element as the masks bind it, and its valid answers. The strict parts that `needs` names are
        loosened and checked. Raises GrammarError, with the part's field, if no value of one is found."""
        schemas: dict[bytes, PartSchema] = {}

        def schema_of(part: Json) -> PartSchema:
            key = msgspec.json.encode(part)
            if key not in schemas:
                schemas[key] = self._loosened(part)[1] if needs(part) else PartSchema(part.schema)
            return schemas[key]

        def loose(part: Json | Regex | Lark) -> Element:
            checks = isinstance(part, Json) and part.strict and schema_of(part).checked
            return self._loosened(part)[0] if isinstance(part, Json) and checks else part

        def compiled(part: Regex) -> CompiledGrammar:
            return self._bytewise.compile(GrammarSpec("regex", part.pattern))

        answers = Answers(whole, schema_of, compiled, self._table.bytewise().special)
        return replace_bound(whole, loose), answers

    def example(self, part: Json) -> str:
        """A valid value of a part, which the masks allow."""
        return self._loosened(part)[1].example

    def _loosened(self, part: Json) -> tuple[Json, PartSchema]:
        """A part as the masks bind it, and what binds it beyond them."""
        key = msgspec.json.encode(part)
        if key not in self._known:
            try:
                self._known[key] = self._loosen(part)
            except GrammarError as error:
                error.param = part.param
                raise
            except ANALYSIS_ERRORS as error:
                raise GrammarError(f"The schema cannot be analysed: {error!r}.", param=part.param) from error
        return self._known[key]

    def _loosen(self, part: Json) -> tuple[Json, PartSchema]:
        source = json.dumps(part.schema)
        written = without_ignored(parse_schema(source))
        check_spelling(written)
        document = resolved(written)
        if any("$recursiveRef" in one for one, _ in subschemas(document)):
            raise GrammarError("Readers differ about $recursiveRef.")
        check_answerable(document)
        checks = PartSchema(part.schema, checked=True, any_order=part.any_order)
        further = checks.completions("")
        found = [*islice(further, 1)]
        if not found:  # rewriting may take seconds, and only begins the same search again
            raise GrammarError("No answer to the schema was found.")

        def values() -> Iterator[str]:
            yield from found.copy()
            for value in further:
                found.append(value)
                yield value

        done: set[str] = set()
        ordered: tuple[Json, PartSchema] | None = None
        for schema in self._looser(document):
            looser = json.dumps(schema)
            keeps = part.any_order and keeps_order(schema, compact=part.compact)
            if looser in done or (ordered and (keeps or schema == loose(document))):
                continue
            done.add(looser)
            with suppress(GrammarError):
                bound = replace(part, schema=schema, strict=False)
                checks.example = self._example(bound, values())
                if not keeps:
                    return bound, checks
                ordered = bound, checks
                if len(looser) > _MOST_REORDERED:
                    break
        if ordered is None:
            raise GrammarError("No answer to the schema was found.")
        return ordered

    def _example(self, loose: Json, values: Iterable[str]) -> str:
        """The first of some values that the loose part allows. Raises GrammarError if it allows none."""
        spec = GrammarSpec(
            "json_schema", json.dumps(loose.schema), False, compact=loose.compact, any_order=loose.any_order
        )
        matcher = self._bytewise.compile(
            analysis_of(_BACKEND, spec, self._table).compile_plan.bytewise
        ).matcher()
        for value in values:
            piece = value.encode()
            if matcher.follows((*piece, STOP)) > len(piece):
                return value
        raise GrammarError("No answer to the schema was found.")


def compile_checked(
    spec: GrammarSpec,
    loosening: Loosening,
    enforced: Callable[[Json], bool],
    build: Callable[[GrammarSpec, str | None], BudgetGrammar],
) -> CheckedGrammar:
    """The grammar of a strict schema, or of a structure. `enforced`: whether a grammar enforces a part of a
    structure. `build` compiles a spec, of which an answer may be known.

    Of a structure, the parts that no grammar enforces are checked. If the others are too complex together,
    all strict parts are. Raises GrammarError, with the part's field, if no answer to one is found.
    """
    if spec.kind == "json_schema":
        schema = json.loads(spec.source)
        whole = Json(schema, True, SCHEMA_PARAM, spec.compact, spec.any_order)
        loose, answers = loosening.answers(whole, lambda _: True)
        assert isinstance(loose, Json), "the whole answer is one part"
        source = json.dumps(loose.schema)
        looser = replace(spec, source=source, strict=False, checked=False)
        return checked(build(looser, loosening.example(whole)), answers)
    structure = decode_structure(spec.source)
    for needs in (lambda part: not enforced(part), lambda _: True):
        loose, answers = loosening.answers(structure, needs)
        with suppress(GrammarError):
            return checked(build(replace(structure_spec(loose), checked=False), None), answers)
    raise GrammarError("No answer was found.")
