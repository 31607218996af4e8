"""Finds the form of a JSON Schema in which a backend enforces it."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from time import thread_time
from typing import TypeVar

import msgspec

from personae.errors import GrammarError
from personae.grammar.backends.llguidance_text import keeps_order
from personae.grammar.budget.analysis import PendingAnalysis
from personae.grammar.budget.build import analysis_of
from personae.grammar.budget.table import TokenTable
from personae.grammar.registry import BACKENDS_OF_KIND, Backends
from personae.grammar.schema.culprits import without_trials
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, parse_schema
from personae.grammar.schema.gate import Unenforced, strip, unenforced
from personae.grammar.schema.prepare import (
    ANALYSIS_ERRORS,
    check_answerable,
    loose,
    readable,
    weakened,
    without_ignored,
)
from personae.grammar.schema.references import resolved
from personae.grammar.schema.rewritten import Rewritings, spelled
from personae.grammar.schema.spelling import check_spelling
from personae.grammar.schema.walk import rebuild
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.compile import enforced
from personae.grammar.tracked.support import uncounted

_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref")
Made = TypeVar("Made")  # of a pending analysis


class SchemaCompiler:
    """`bytewise` are backends over bytes, which say whether a form is enforced."""

    def __init__(self, bytewise: Backends, table: TokenTable) -> None:
        self._bytewise = bytewise
        self._table = table

    def compile(
        self, spec: GrammarSpec, finish: Callable[[PendingAnalysis], Made], rewritings: Rewritings
    ) -> Made:
        """The result of `finish` for the first form of the schema that is enforced and compiles. Raises
        GrammarError."""
        try:
            return self._compile(spec, finish, rewritings)
        except ANALYSIS_ERRORS as error:
            raise GrammarError(f"The schema cannot be analysed: {error!r}.", param=SCHEMA_PARAM) from error

    def _compile(
        self, spec: GrammarSpec, finish: Callable[[PendingAnalysis], Made], rewritings: Rewritings
    ) -> Made:
        begun = thread_time()
        written = without_ignored(parse_schema(spec.source))
        document = resolved(written)
        check_answerable(document)
        if spec.strict:
            check_spelling(written, lambda one: self.is_enforced(one, rewritings))
        reason: Unenforced | GrammarError | None = None
        tried, ordered = [], []
        names = BACKENDS_OF_KIND["json_schema"]
        for schema in rewritings(document, any_order=spec.any_order):
            tried.append(schema)
            for name in names:
                missing: Unenforced | GrammarError | None = next(unenforced(schema, name), None)
                if missing is None:
                    if spec.any_order and (name != names[0] or keeps_order(schema, compact=spec.compact)):
                        ordered.append((name, schema))
                        continue
                    try:
                        return finish(self._analyse(name, spec, schema, strict=True))
                    except GrammarError as error:
                        missing = error
                if name == names[0]:
                    reason = missing
        for name, schema in ordered:  # no form is free of the schema's order
            try:
                return finish(self._analyse(name, spec, schema, strict=True))
            except GrammarError as error:
                reason = error
        if spec.strict:
            spent = thread_time() - begun
            raise without_trials(written, reason, spent=spent)
        return self._compile_best_effort(spec, document, finish, tried)

    def is_enforced(self, document: Schema, rewritings: Rewritings) -> bool:
        """Whether one of a schema's rewritings is enforced completely."""
        found = enforced(resolved(document), self._bytewise.get("llguidance"), rewritings)
        return any(True for _ in found)

    def _compile_best_effort(
        self,
        spec: GrammarSpec,
        document: Schema,
        finish: Callable[[PendingAnalysis], Made],
        equal: list[Schema],
    ) -> Made:
        """Bind as much of the schema as llguidance supports, at least to JSON."""
        for schema in self.looser(document, equal):
            with suppress(GrammarError):
                return finish(self._analyse("llguidance", spec, schema, strict=False))
        return finish(self._analyse("llguidance", spec, True, strict=False))

    def looser(self, document: Schema, equal: Iterable[Schema]) -> Iterator[Schema]:
        """Schemas that bind less and less of `document`. `equal` are those equal to it."""
        written = _applicators_last(weakened(spelled(strip(document)), "llguidance"))
        yield written
        yield uncounted(written)
        reads = cache(self._reads)
        for schema in equal:
            yield uncounted(readable(weakened(schema, "llguidance"), reads))
        yield loose(document)

    def _reads(self, pattern: str) -> bool:
        """Whether llguidance can read a pattern."""
        text = json.dumps({"type": "string", "pattern": pattern})
        try:
            self._bytewise.get("llguidance").compile(GrammarSpec("json_schema", text))
        except GrammarError:
            return False
        return True

    def _analyse(self, name: str, spec: GrammarSpec, schema: Schema, *, strict: bool) -> PendingAnalysis:
        bound = msgspec.structs.replace(spec, source=json.dumps(schema), strict=strict)
        return analysis_of(name, bound, self._table)


def _applicators_last(schema: Schema) -> Schema:
    """The schema with its own properties before those of its alternatives: the library writes them in the
    order of the keywords."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: _applicators_last(child))
    return dict(sorted(rebuilt.items(), key=lambda item: item[0] in _APPLICATORS))
