"""Compiles a structure. Every schema in it goes through the same gate as one that binds a whole answer. Every
regular expression and grammar is first compiled alone, so that an error names its field."""

import json
from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from personae.errors import GrammarError
from personae.grammar.backend import GrammarBackend
from personae.grammar.backends.llguidance_text import json_rule, keeps_order, regex_lexeme
from personae.grammar.budget.analysis import CompilePlan, PendingAnalysis
from personae.grammar.budget.distance_bound import DistanceBound
from personae.grammar.budget.structures import entries, structure_bound
from personae.grammar.budget.table import TokenTable
from personae.grammar.budget.token_ids import over_bytes
from personae.grammar.schema.culprits import explained, without_trials
from personae.grammar.schema.document import Schema, parse_schema
from personae.grammar.schema.formats import spell_formats
from personae.grammar.schema.gate import Unenforced, strip, unenforced
from personae.grammar.schema.members import separated, sets_as_written
from personae.grammar.schema.patterns import plain_patterns
from personae.grammar.schema.prepare import (
    ANALYSIS_ERRORS,
    check_answerable,
    refusal,
    weakened,
    without_ignored,
)
from personae.grammar.schema.references import resolved
from personae.grammar.schema.rewritten import Rewritings, rewritten
from personae.grammar.schema.spelling import check_spelling
from personae.grammar.schema.walk import SET
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Element, Json, Lark, Regex, decode_structure, replace_bound
from personae.grammar.structure.lark import BoundElement, lark
from personae.grammar.structure.sets import places
from personae.grammar.tracked.support import uncounted

_BACKEND = "llguidance"


def structure_analysis(
    spec: GrammarSpec, backend: GrammarBackend, table: TokenTable, rewritings: Rewritings
) -> PendingAnalysis:
    """Analyse a spec of kind "structure" for llguidance. `rewritings` gives schemas equal to one.

    Raises GrammarError, with the element's own `param`, if a strict schema cannot be enforced.
    """

    whole = decode_structure(spec.source)
    reads_sets = places(whole) is not None

    def bind(element: BoundElement) -> BoundElement:
        try:
            match element:
                case Json():
                    return _bound(element, backend, rewritings, sets=reads_sets)
                case Regex(pattern=pattern):
                    backend.compile(GrammarSpec("regex", pattern))
                case Lark(source=source):
                    backend.compile(GrammarSpec("lark", source))
        except GrammarError as error:
            error.param = element.param
            raise
        except ANALYSIS_ERRORS as error:
            raise GrammarError(f"The schema cannot be analysed: {error!r}.", param=element.param) from error
        return element

    def written(whole: Element, special: Mapping[str, int]) -> GrammarSpec:
        return GrammarSpec("lark", lark(whole, special, _written), sets=sets)

    def by_bytes(part: BoundElement) -> BoundElement:
        if not isinstance(part, Lark):
            return part
        return replace(part, source=over_bytes(part.source, table, part.param))

    def bounds() -> DistanceBound | None:
        try:
            return structure_bound(element, table.measure)
        except ANALYSIS_ERRORS:
            return None

    element = replace_bound(whole, bind)
    found = places(element)
    if found is None and reads_sets and SET.encode() in msgspec.json.encode(element):
        reads_sets = False  # rewritten, the schemas no longer say that they are of objects
        element = replace_bound(whole, bind)
    sets = msgspec.json.encode(found).decode()
    if not reads_sets or SET not in sets:
        sets = ""
    second = written(replace_bound(element, by_bytes), table.bytewise().special)
    compile_plan = CompilePlan(_BACKEND, written(element, table.vocabulary.special), second)
    return PendingAnalysis(compile_plan, bounds, entries(element))


def _written(element: BoundElement) -> str:
    """The right side of a rule."""
    match element:
        case Json(schema=schema, strict=strict, compact=compact, any_order=any_order):
            return json_rule(schema, strict, compact, any_order)
        case Regex(pattern=pattern):
            return regex_lexeme(pattern)
        case Lark(source=source):
            return f"%lark {{\n{source}\n}}"


def _bound(element: Json, backend: GrammarBackend, rewritings: Rewritings, *, sets: bool) -> Json:
    """The element with the schema that is enforced. `sets`: a matcher reads along for sets of strings."""
    asked = without_ignored(parse_schema(json.dumps(element.schema)))
    document = resolved(asked)
    check_answerable(document)

    def within(schema: Schema, *, any_order: bool = False) -> Iterator[Schema]:
        found = rewritings(schema, any_order=any_order)
        return found if sets else map(sets_as_written, found)

    def is_enforced(schema: Schema) -> bool:
        return any(True for _ in enforced(resolved(schema), backend, within))

    if element.strict:
        check_spelling(asked, is_enforced)
    reasons: list[Unenforced | GrammarError] = []
    found = enforced(document, backend, within, reasons, any_order=element.any_order)
    first = next(found, None)
    if first is not None:
        compact = element.compact
        if element.any_order and keeps_order(first, compact=compact):
            first = next((one for one in found if not keeps_order(one, compact=compact)), first)
        return replace(element, schema=first, strict=True)
    if element.strict:
        raise explained(asked, without_trials(asked, reasons[0]), is_enforced)
    spelled = separated(spell_formats(plain_patterns(strip(document))))
    weaker = weakened(spelled if sets else sets_as_written(spelled), _BACKEND)
    for schema in (weaker, uncounted(weaker), {"type": "object"}):
        try:
            backend.compile(_spec(schema, strict=False))
        except GrammarError as error:
            reasons.append(error)
        else:
            return replace(element, schema=schema, strict=False)
    raise refusal(asked, reasons[-1])


def is_enforced(element: Json, backend: GrammarBackend) -> bool:
    """Whether a grammar enforces all that a structure's strict part asks for, in some equal form."""
    try:
        document = resolved(without_ignored(parse_schema(json.dumps(element.schema))))
        return any(True for _ in enforced(document, backend, rewritten))
    except (GrammarError, *ANALYSIS_ERRORS):
        return False


def enforced(
    document: Schema,
    backend: GrammarBackend,
    rewritings: Rewritings,
    reasons: list[Unenforced | GrammarError] | None = None,
    *,
    any_order: bool = False,
) -> Iterator[Schema]:
    """Those of a schema's rewritings that llguidance enforces completely. Adds to `reasons` why the others
    are not enforced."""
    for schema in rewritings(document, any_order=any_order):
        missing: Unenforced | GrammarError | None = next(unenforced(schema, _BACKEND), None)
        if missing is None:
            try:
                backend.compile(_spec(schema, strict=True))
            except GrammarError as error:
                missing = error
            else:
                yield schema
                continue
        if reasons is not None:
            reasons.append(missing)


def _spec(schema: Schema, *, strict: bool) -> GrammarSpec:
    """The spec of a schema in its own order; what cannot be written in any order keeps the schema's order."""
    return GrammarSpec("json_schema", json.dumps(schema), strict)
