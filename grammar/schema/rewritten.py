"""Equal forms of a schema, of which a grammar may enforce one where it does not enforce what is written."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from personae.grammar.schema.canonical import TooLarge, canonicalise
from personae.grammar.schema.complements import modern, without_conditions
from personae.grammar.schema.disjoint import without_disjoint_one_of
from personae.grammar.schema.document import Schema
from personae.grammar.schema.formats import spell_formats
from personae.grammar.schema.gate import strip
from personae.grammar.schema.listed import with_values_left
from personae.grammar.schema.members import named_once, objects_spelled_out, separated
from personae.grammar.schema.merged import merged
from personae.grammar.schema.overlaps import without_overlaps
from personae.grammar.schema.patterns import plain_patterns
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.schema.shared import shared_as_written


class Rewritings(Protocol):
    """Gives schemas equal to one."""

    def __call__(self, document: Schema, /, *, any_order: bool = False) -> Iterator[Schema]:
        """`any_order`: those are preferred whose properties may come in any order."""


def rewritten(document: Schema, *, any_order: bool = False) -> Iterator[Schema]:
    """Schemas equal to `document`: as written, then in canonical form if it has one. At the end come those
    that accept a part of what it accepts.

    With `any_order` come, behind the first, those in which all that is said of an object is in one place.

    Repeated parts become definitions, so that the library reads each of them once. No schema comes twice.
    """
    forms = _forms(document, any_order=any_order)
    first = next(forms)
    yield first
    given = {json.dumps(first)}  # written only now: most schemas need no second form
    for schema in forms:
        text = json.dumps(schema)
        if text not in given:
            given.add(text)
            yield schema


def _forms(document: Schema, *, any_order: bool) -> Iterator[Schema]:
    """As `rewritten`, some of them twice."""
    written = next(as_written(document))
    shorter = shared_as_written(written)
    yield shorter
    if any_order:
        yield from _in_one_place(strip(document))
    if shorter is not written:
        yield written
    left: Schema = document
    with suppress(*ANALYSIS_ERRORS):
        left = with_values_left(document)
    too_large = False
    with suppress(Exception):  # there is none, whatever the library's error
        try:
            yield _in_canonical_form(left)
        except TooLarge:
            too_large = True
    if not any_order:
        yield from _merged(strip(document))
    before = ""
    for by_tags in (True, False):
        plainer: Schema | None = None
        with suppress(*ANALYSIS_ERRORS):
            plainer = strip(without_conditions(left, by_tags=by_tags))
        text = json.dumps(plainer)
        if plainer is not None and text != before:
            before = text
            yield spelled(plainer)
            if not too_large:
                with suppress(Exception):  # it has no canonical form, or too large a one
                    yield spelled(without_overlaps(strip(canonicalise(plainer))))
            yield from _in_one_place(plainer) if any_order else _merged(plainer)


def _in_canonical_form(document: Schema) -> Schema:
    canonical = strip(canonicalise(document))
    apart = without_overlaps(canonical)
    if apart != canonical:
        canonical = strip(canonicalise(apart))
    return spelled(canonical)


def _merged(document: Schema) -> Iterator[Schema]:
    """The schema with everything that it says of a value in one place, if that is known."""
    with suppress(*ANALYSIS_ERRORS):
        together = merged(modern(without_disjoint_one_of(document)))
        if together is not None:
            yield spelled(together)
            apart = without_overlaps(together)
            if apart is not together:
                yield spelled(merged(apart) or apart)


def _in_one_place(document: Schema) -> Iterator[Schema]:
    """The schema with everything that it says of an object in one place, if that is known: alternatives are
    spread over the rest, and no name matches two parts of an object."""
    with suppress(*ANALYSIS_ERRORS):
        written = modern(without_disjoint_one_of(document))
        together = merged(written, spread=True) or written
        apart = without_overlaps(together, listed=True)
        if apart is not together:
            apart = merged(apart, spread=True) or apart
        found = named_once(spelled(objects_spelled_out(apart)))
        if apart is not written or found != spelled(written):
            yield found


def as_written(document: Schema, *, any_order: bool = False) -> Iterator[Schema]:
    """The schema as written, in keywords that backends support. `any_order` makes no difference."""
    yield spelled(without_disjoint_one_of(strip(document)))


def spelled(schema: Schema) -> Schema:
    """The schema in keywords that backends support."""
    spelled: Schema = separated(spell_formats(plain_patterns(schema)))
    return spelled
