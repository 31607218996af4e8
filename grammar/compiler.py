"""Compiles specs to grammars. The actor above shares compiles that are in progress.

`compile` may run on any number of threads at once. `get` and `put` are quick and may be called from anywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import NamedTuple

import msgspec

from personae.errors import GrammarError, NotEnforced
from personae.grammar.backend import BoundGrammar, GrammarBackend
from personae.grammar.budget.analysis import Analysis, CompilePlan, PendingAnalysis
from personae.grammar.budget.automaton import AutomatonGrammar
from personae.grammar.budget.build import Compiling, analyse, analysis_of, build
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.table import TokenTable
from personae.grammar.cache import GrammarCache
from personae.grammar.checked.compile import Loosening, compile_checked
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.matcher import Grammar
from personae.grammar.reasoning.limit import LimitedGrammar, Tags
from personae.grammar.regex.parse import NotRegular
from personae.grammar.regex.plain import looks_around, without_looks
from personae.grammar.registry import BACKENDS_OF_KIND, Backends
from personae.grammar.sandbox.forkserver import Sandbox
from personae.grammar.sandbox.masks import Processes, RemoteGrammar
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.sandbox.small import is_foreign, is_small
from personae.grammar.sandbox.warm_up import FIRST_SPECS
from personae.grammar.schema.culprits import explained
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX, Schema, parse_schema
from personae.grammar.schema.prepare import without_ignored
from personae.grammar.schema.rewritten import Rewritings, as_written, rewritten
from personae.grammar.schema_compiler import Made, SchemaCompiler
from personae.grammar.spec import GrammarSpec, ReasoningLimit
from personae.grammar.structure.compile import is_enforced, structure_analysis
from personae.grammar.structure.elements import is_in_any_order
from personae.grammar.structure.loosened import loosened
from personae.grammar.vocabulary import Vocabulary


def _ignore(compile_plan: CompilePlan) -> None:
    """Ignores the report."""


def _may_be_checked(spec: GrammarSpec, error: GrammarError) -> bool:
    """Whether checks of each token may bind what `error` has refused."""
    if not isinstance(error, NotEnforced) and error.code != TOO_COMPLEX:
        return False
    return spec.kind in ("json_schema", "structure") and spec.strict and spec.backend is None


def _without_looks(spec: GrammarSpec) -> GrammarSpec:
    try:
        return msgspec.structs.replace(spec, source=without_looks(spec.source))
    except NotRegular as error:
        raise GrammarError(
            f"The regular expression cannot be enforced: {error}.", param=PARAMS["regex"]
        ) from error


class _NeedsSandbox(Exception):
    """A schema is not enforced as it is written. It is rewritten in the sandbox only."""


def _as_written_here(document: Schema, *, any_order: bool = False) -> Iterator[Schema]:
    """As `as_written`. Raises _NeedsSandbox where others would come."""
    yield from as_written(document, any_order=any_order)
    raise _NeedsSandbox


class _Attempt(NamedTuple):
    """A spec, and the forms of its schemas that are tried."""

    spec: GrammarSpec
    rewritings: Rewritings


def _attempts(spec: GrammarSpec) -> Iterator[_Attempt]:
    """The forms in which a spec may be bound; those behind the first are for what is too complex. What is in
    any order, or not strict, is bound without being rewritten. What is not strict is bound by its types."""
    yield _Attempt(spec, rewritten)
    loose = loosened(spec)
    if loose is not None or is_in_any_order(spec):
        yield _Attempt(spec, as_written)
    if loose is not None and loose != spec:
        yield _Attempt(loose, rewritten)


class GrammarCompiler:
    """Compiles the grammars of one tokenizer. `cache` holds some.

    What is not small, or has to be rewritten first, is compiled in processes of its own. These also make the
    masks of grammars that clients write (`sandbox/masks.py`), within `limits`. With `sandboxed` False
    everything is done here, without limits.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cache_bytes: int = 256 * 2**20,
        sandboxed: bool = True,
        limits: SandboxLimits | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.cache = GrammarCache(cache_bytes)
        self._sandbox = Sandbox(vocabulary, limits) if sandboxed else None
        self._table = TokenTable(vocabulary)
        self._backends = Backends(vocabulary)
        self._backends.get("llguidance")  # nearly all specs need it, and a large vocabulary takes a second
        self._bytewise = Backends(self._table.bytewise())
        self._schemas = SchemaCompiler(self._bytewise, self._table)
        self._tags: dict[ReasoningLimit, Tags] = {}
        self._processes = Processes()

    def warm_up(self) -> None:
        """Prepare, on a separate thread, what the first compiles would otherwise wait for."""
        Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        if self._sandbox is not None:
            self._sandbox.start()
        self._backends.get("outlines")
        for spec in FIRST_SPECS:
            with suppress(GrammarError, _NeedsSandbox):
                self._compile(spec, self._build, _as_written_here)

    def get(self, spec: GrammarSpec, tenant: str = "") -> Grammar | None:
        """See `GrammarCache`."""
        return self.cache.get(spec, tenant)

    def put(self, spec: GrammarSpec, grammar: Grammar, tenant: str = "") -> None:
        """See `GrammarCache`."""
        self.cache.put(spec, grammar, tenant)

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Grammar:
        """Compile without the cache, with the fastest backend that enforces the whole spec.

        The ways are tried in turn, each after a refusal that it may mend:

        1. A client's grammar has a process of its own, which makes its masks.
        2. A small automaton, if the answer is a choice or a regular expression.
        3. The spec in each of its forms (`_attempts`), here or in the sandbox.
        4. Checks of each token (checked/), if it is strict, also as a part of a structure without grammars,
           and names no backend.

        If a schema is not `strict`, it is bound as far as possible; check the answer with
        `schema.validate.validate_answer`. Raises GrammarError if the spec is malformed, or if a strict spec
        cannot be enforced or compiled within the limits. Raises Overloaded if this is not known in time.
        """
        if self._sandbox is not None and is_foreign(spec):
            self._automaton(spec)
            return self._remote(self._sandbox, spec, tenant)
        try:
            return self._bound(spec, tenant)
        except GrammarError as error:
            refused = error.with_traceback(None)  # it holds what the sandbox's answer came through
        if _may_be_checked(spec, refused):
            try:
                return self._checked(msgspec.structs.replace(spec, checked=True), tenant)
            except GrammarError as error:
                if spec.kind == "structure" and error.param not in (None, refused.param):
                    raise  # it is another part's
        raise self.explained(spec, refused)

    def compile_here(self, spec: GrammarSpec, tenant: str = "") -> BoundGrammar:
        """As `compile`, but with checks only if `spec.checked`. The masks are made here, also for a grammar
        of a client."""
        try:
            return self._bound(spec, tenant)
        except GrammarError as error:
            refused = error.with_traceback(None)
        raise self.explained(spec, refused)

    def explained(self, spec: GrammarSpec, refusal: GrammarError) -> GrammarError:
        """A refusal that names all keywords that have to go from a schema, if trials may find them and do."""
        if not isinstance(refusal, NotEnforced) or not refusal.unexplained:
            return refusal
        if self._sandbox is not None:
            return self._sandbox.explain(spec, refusal)
        written = without_ignored(parse_schema(spec.source))
        return explained(written, refusal, lambda one: self._schemas.is_enforced(one, rewritten))

    def _bound(self, spec: GrammarSpec, tenant: str) -> BoundGrammar:
        """As `compile_here`. A refusal is not explained yet."""
        if spec.reasoning is not None:
            return self._limited(msgspec.structs.replace(spec, reasoning=None), spec.reasoning, tenant)
        if spec.checked:
            return self._checked_here(spec)
        automaton = self._automaton(spec)
        if automaton is not None:
            return automaton
        refused: GrammarError | None = None
        for attempt in _attempts(spec):
            try:
                return self._tried(attempt)
            except GrammarError as error:
                refused = refused or error.with_traceback(None)
                if refused.code != TOO_COMPLEX:
                    break
        assert refused is not None, "a spec has a form"
        raise refused

    def _tried(self, attempt: _Attempt) -> BudgetGrammar:
        """Compiled here if it is small and is enforced without being rewritten, or there is no sandbox. Else
        the sandbox analyses the answers meanwhile: a compile that has ended there once will end here too."""
        if self._sandbox is None:
            return self._compile(attempt.spec, self._build, attempt.rewritings)
        if is_small(attempt.spec):
            with suppress(_NeedsSandbox):
                return self._compile(attempt.spec, self._build, _as_written_here)
        begun: list[Compiling] = []
        analysis = self._sandbox.analyse(
            attempt.spec,
            may_rewrite=attempt.rewritings is rewritten,
            report=lambda compile_plan: begun.append(Compiling(compile_plan, *self._pair(compile_plan))),
        )
        try:
            return begun[-1].grammar(analysis, self._table)
        except GrammarError as error:  # over the model's tokens it takes more than over bytes
            raise GrammarError(error.message, param=error.param, code=TOO_COMPLEX) from error

    def analyse(
        self,
        spec: GrammarSpec,
        *,
        rewritings: Rewritings = rewritten,
        report: Callable[[CompilePlan], None] = _ignore,
    ) -> Analysis:
        """Analyse a spec without a limit on its reasoning. Raises as `compile` does, but for `explained`.

        The forms of its schemas that `rewritings` gives are tried. Calls `report` with each plan that has
        been compiled, before its answers are analysed; the last one is that of the result.
        """
        return self._compile(
            spec,
            lambda pending: analyse(
                pending, self._bytewise.get(pending.compile_plan.backend), self._table, report
            ),
            rewritings,
        )

    def close(self) -> None:
        """End the helper processes."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _checked(self, spec: GrammarSpec, tenant: str) -> Grammar:
        """A grammar that checks each token. What that costs is not known in advance."""
        if self._sandbox is None:
            return self._checked_here(spec)
        return self._remote(self._sandbox, spec, tenant)

    def _checked_here(self, spec: GrammarSpec) -> CheckedGrammar:
        bytewise = self._bytewise.get("llguidance")
        loosening = Loosening(
            lambda document: self._schemas.looser(document, rewritten(document)), bytewise, self._table
        )
        return compile_checked(spec, loosening, lambda part: is_enforced(part, bytewise), self._build_loose)

    def _build_loose(self, spec: GrammarSpec, example: str | None) -> BudgetGrammar:
        """The grammar of a spec whose schemas are already as loose as they have to be. `example`: one of its
        answers, which no search has to find then."""
        if spec.kind == "json_schema":
            pending = analysis_of("llguidance", spec, self._table)
            return self._build(replace(pending, example=example))
        return self._build(structure_analysis(spec, self._backends.get("llguidance"), self._table, rewritten))

    def _remote(self, sandbox: Sandbox, spec: GrammarSpec, tenant: str) -> RemoteGrammar:
        """A grammar in a process of its own, of which the number is limited."""
        self._processes.enter(tenant, self.cache.drop_processes)
        try:
            return sandbox.masks(spec, partial(self._processes.leave, tenant))
        except BaseException:
            self._processes.leave(tenant)
            raise

    def _compile(
        self, spec: GrammarSpec, finish: Callable[[PendingAnalysis], Made], rewritings: Rewritings
    ) -> Made:
        """The result of `finish` for the pending analysis of the spec."""
        if spec.kind == "json_schema":
            return self._schemas.compile(spec, finish, rewritings)
        name = BACKENDS_OF_KIND[spec.kind][-1]
        if spec.kind == "structure":
            return finish(structure_analysis(spec, self._backends.get(name), self._table, rewritings))
        if spec.kind == "regex" and looks_around(spec.source):
            spec = _without_looks(spec)
        return finish(analysis_of(name, spec, self._table))

    def _automaton(self, spec: GrammarSpec) -> BoundGrammar | None:
        """An automaton, if the spec is a small one; its size is known before it is built. Raises GrammarError
        if the spec names a backend that does not enforce it."""
        names = BACKENDS_OF_KIND[spec.kind]
        if spec.backend not in (None, *names):
            raise GrammarError(
                f"The backend {spec.backend} does not support a {spec.kind}.", param=PARAMS.get(spec.kind)
            )
        if "outlines" not in names or spec.backend not in (None, "outlines"):
            return None
        try:
            grammar = self._backends.get("outlines").compile(spec)
        except GrammarError:
            if spec.backend is not None:
                raise
            return None
        return grammar if isinstance(grammar, AutomatonGrammar) else None

    def _limited(self, spec: GrammarSpec, limit: ReasoningLimit, tenant: str) -> LimitedGrammar:
        """A grammar with a limit on reasoning. All limits of an equal spec share the compiled grammar."""
        inner = self.cache.get(spec, tenant)
        if not isinstance(inner, BoundGrammar):
            inner = self._bound(spec, tenant)
            self.cache.put(spec, inner, tenant)
        format = msgspec.structs.replace(limit, tokens=0, opened=False)
        tags = self._tags.get(format)
        if tags is None:
            tags = self._tags[format] = Tags(format, self._table)
        return LimitedGrammar(inner, limit, tags)

    def _build(self, pending: PendingAnalysis) -> BudgetGrammar:
        return build(pending, *self._pair(pending.compile_plan), self._table)

    def _pair(self, compile_plan: CompilePlan) -> tuple[GrammarBackend, GrammarBackend]:
        return self._backends.get(compile_plan.backend), self._bytewise.get(compile_plan.backend)
