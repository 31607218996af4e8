"""Compiles specs to grammars, with a cache. The actor above shares compiles that are in progress.

`compile` may run on any number of threads at once. `get` and `put` are quick and may be called from anywhere.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from threading import Lock, Thread
from time import thread_time
from typing import TypeVar

import msgspec

from personae.errors import GrammarError, NotEnforced
from personae.grammar.backend import BoundGrammar, GrammarBackend
from personae.grammar.backends.llguidance_text import keeps_order
from personae.grammar.budget.analysis import Analysis, CompilePlan, PendingAnalysis
from personae.grammar.budget.automaton import Automaton
from personae.grammar.budget.build import Compiling, analyse, analysis_of, build
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.table import TokenTable
from personae.grammar.checked.compile import Loosening, compile_checked
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.productive import matches_nothing
from personae.grammar.reasoning.limit import LimitedGrammar, Tags
from personae.grammar.registry import BACKENDS_OF_KIND, make_backend
from personae.grammar.sandbox.forkserver import Sandbox
from personae.grammar.sandbox.masks import AnyGrammar, Processes, RemoteGrammar
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.sandbox.small import is_foreign, is_small
from personae.grammar.sandbox.warm_up import FIRST_SPECS
from personae.grammar.schema.culprits import explained, without_trials
from personae.grammar.schema.document import (
    PARAMS,
    SCHEMA_PARAM,
    TOO_COMPLEX,
    Schema,
    parse_schema,
)
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
from personae.grammar.schema.rewritten import Rewritings, as_written, rewritten, spelled
from personae.grammar.schema.spelling import check_spelling
from personae.grammar.size_estimate import size_estimate
from personae.grammar.spec import GrammarKey, GrammarSpec, ReasoningLimit
from personae.grammar.structure.compile import enforced, is_enforced, structure_analysis
from personae.grammar.structure.elements import is_in_any_order
from personae.grammar.structure.loosened import loosened
from personae.grammar.tracked.support import uncounted
from personae.grammar.vocabulary import Vocabulary

Made = TypeVar("Made")  # of a pending analysis


def _ignore(compile_plan: CompilePlan) -> None:
    """Ignores the report."""


def _may_be_checked(spec: GrammarSpec, error: GrammarError) -> bool:
    """Whether checks of each token may bind what `error` has refused."""
    if not isinstance(error, NotEnforced) and error.code != TOO_COMPLEX:
        return False
    return spec.kind in ("json_schema", "structure") and spec.strict and spec.backend is None


class _NeedsSandbox(Exception):
    """The spec needs something that is only done in the sandbox."""


class GrammarCompiler:
    """Compiled grammars of one tokenizer. When the cache is over its bytes, the least recently used are
    dropped.

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
        self._sandbox = Sandbox(vocabulary, limits) if sandboxed else None
        # The backend of nearly all specs is built now: it takes a second for a large vocabulary.
        self._backends = {"llguidance": make_backend("llguidance", vocabulary)}
        self._backends_lock = Lock()
        self._table = TokenTable(vocabulary)
        self._bytewise: dict[str, GrammarBackend] = {}
        self._tags: dict[ReasoningLimit, Tags] = {}
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[GrammarKey, AnyGrammar] = OrderedDict()
        self._sizes: dict[GrammarKey, int] = {}
        self._processes = Processes()
        self._bytes = 0
        self._lock = Lock()

    @property
    def cached_bytes(self) -> int:
        """Bytes held by the cache, including the estimated growth of its grammars."""
        return self._bytes

    def warm_up(self) -> None:
        """Prepare, on a separate thread, what the first compiles would otherwise wait for."""
        Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        if self._sandbox is not None:
            self._sandbox.start()
        self._backend("outlines")
        for spec in FIRST_SPECS:
            with suppress(GrammarError, _NeedsSandbox):
                self._compile(spec, self._build)

    def get(self, spec: GrammarSpec, tenant: str = "") -> AnyGrammar | None:
        """The compiled grammar of an equal spec of this tenant, if it is in the cache."""
        with self._lock:
            grammar = self._cached.get((tenant, spec))
            if isinstance(grammar, RemoteGrammar) and grammar.ended:
                self._forget((tenant, spec))
                return None
            if grammar is not None:
                self._cached.move_to_end((tenant, spec))
            return grammar

    def put(self, spec: GrammarSpec, grammar: AnyGrammar, tenant: str = "") -> None:
        """Cache a compiled grammar, unless it alone is over the cache's bytes."""
        here = isinstance(grammar, Automaton | RemoteGrammar)
        nbytes = grammar.nbytes + (0 if here else size_estimate(spec))
        key = (tenant, spec)
        with self._lock:
            if key in self._cached or nbytes > self._cache_bytes:
                return
            self._cached[key] = grammar
            self._sizes[key] = nbytes
            self._bytes += nbytes
            while self._bytes > self._cache_bytes:
                self._forget(next(iter(self._cached)))

    def _forget(self, key: GrammarKey) -> None:
        """Drop it from the cache. Answers that are bound by it keep it."""
        del self._cached[key]
        self._bytes -= self._sizes.pop(key)

    def _let_go(self, tenant: str | None) -> None:
        """Drop the cached processes that make masks: those of a tenant, or all."""
        with self._lock:
            for key, grammar in [*self._cached.items()]:
                if isinstance(grammar, RemoteGrammar) and tenant in (None, key[0]):
                    self._forget(key)

    def compile(self, spec: GrammarSpec, tenant: str = "") -> AnyGrammar:
        """Compile without the cache, with the fastest backend that enforces the whole spec.

        If a schema is not `strict` and no backend enforces all of it, it is bound as far as possible; check
        the answer with `schema.validate.validate_answer`. If it is strict, also as a part of a structure
        without grammars, and the spec names no backend, each token is checked (checked/), also where a
        grammar would be too complex. Raises GrammarError if the spec is malformed, or if a strict spec cannot
        be enforced or compiled within the limits. Raises Overloaded if this is not known in time.
        """
        if self._sandbox is not None and is_foreign(spec):
            self._automaton(spec)
            if spec.kind == "ebnf" and matches_nothing(spec.source):
                raise GrammarError("The grammar, read as GBNF, matches no text.", param=PARAMS[spec.kind])
            return self._remote(self._sandbox, spec, tenant)
        try:
            return self._compiled(spec, tenant)
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
            return self._compiled(spec, tenant)
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
        return explained(written, refusal, lambda one: self._enforced(one, rewritten))

    def _compiled(self, spec: GrammarSpec, tenant: str) -> BoundGrammar:
        """As `compile_here`. A refusal is not explained yet."""
        if spec.reasoning is not None:
            return self._limited(msgspec.structs.replace(spec, reasoning=None), spec.reasoning, tenant)
        if spec.checked:
            return self._checked_here(spec)
        automaton = self._automaton(spec)
        if automaton is not None:
            return automaton
        if self._sandbox is not None:
            with suppress(_NeedsSandbox):
                if is_small(spec):
                    return self._compiled_here(spec)
            return self._compiled_by(self._sandbox, spec)
        return self._compiled_here(spec)

    def _compiled_here(self, spec: GrammarSpec) -> BudgetGrammar:
        """Compile here. A spec that cannot be closed and is not strict is bound loosely."""
        try:
            return self._compile(spec, self._build)
        except GrammarError as error:
            looser = loosened(spec) if error.code == TOO_COMPLEX else None
            if looser is None or looser == spec:
                raise
            return self._compile(looser, self._build)

    def analyse(
        self, spec: GrammarSpec, *, rewritten: bool = True, report: Callable[[CompilePlan], None] = _ignore
    ) -> Analysis:
        """Analyse a spec without a limit on its reasoning. Raises as `compile` does, but for `explained`.

        Unless `rewritten`, schemas that are not enforced as they are written are not brought into another
        form. Calls `report` with each plan that has been compiled, before its answers are analysed; the last
        one is that of the result.
        """
        rewritings = self._rewritings if rewritten else as_written
        return self._compile(
            spec,
            lambda pending: analyse(
                pending, self._bytewise_backend(pending.compile_plan.backend), self._table, report
            ),
            rewritings,
        )

    def close(self) -> None:
        """End the helper processes."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _checked(self, spec: GrammarSpec, tenant: str) -> AnyGrammar:
        """A grammar that checks each token. What that costs is not known in advance."""
        if self._sandbox is None:
            return self._checked_here(spec)
        return self._remote(self._sandbox, spec, tenant)

    def _checked_here(self, spec: GrammarSpec) -> CheckedGrammar:
        bytewise = self._bytewise_backend("llguidance")
        loosening = Loosening(
            lambda document: self._looser(document, rewritten(document)), bytewise, self._table
        )
        return compile_checked(spec, loosening, lambda part: is_enforced(part, bytewise), self._build_loose)

    def _build_loose(self, spec: GrammarSpec) -> BudgetGrammar:
        """The grammar of a spec whose schemas are already as loose as they have to be."""
        if spec.kind == "json_schema":
            return self._build(analysis_of("llguidance", spec, self._table))
        return self._build(structure_analysis(spec, self._backend("llguidance"), self._table, rewritten))

    def _remote(self, sandbox: Sandbox, spec: GrammarSpec, tenant: str) -> RemoteGrammar:
        """A grammar in a process of its own, of which the number is limited."""
        self._processes.enter(tenant, self._let_go)
        try:
            return sandbox.masks(spec, partial(self._processes.leave, tenant))
        except BaseException:
            self._processes.leave(tenant)
            raise

    def _compiled_by(self, sandbox: Sandbox, spec: GrammarSpec) -> BudgetGrammar:
        """Compile here while the sandbox analyses the answers. A compile that has ended there once will end
        here too.

        Over the model's tokens it may take more than over bytes, and be refused only here.
        """
        begun: list[Compiling] = []
        analysis = self._analyse_in_sandbox(
            spec,
            sandbox,
            lambda compile_plan: begun.append(Compiling(compile_plan, *self._pair(compile_plan))),
        )
        try:
            return begun[-1].grammar(analysis, self._table)
        except GrammarError:
            looser = loosened(spec)
            if looser is None or looser == spec:
                raise
            return self._compiled_by(sandbox, looser)

    def _analyse_in_sandbox(
        self, spec: GrammarSpec, sandbox: Sandbox, report: Callable[[CompilePlan], None]
    ) -> Analysis:
        """Analyse in the sandbox. A spec that is too complex is bound as it is written if it is not strict or
        in any order, which may be what takes too long. What is not strict may be bound loosely."""
        try:
            return sandbox.analyse(spec, report=report)
        except GrammarError as error:
            if error.code != TOO_COMPLEX:
                raise
            looser = loosened(spec)
            if looser is not None or is_in_any_order(spec):
                with suppress(GrammarError):
                    return sandbox.analyse(spec, rewritten=False, report=report)
            if looser is not None:
                with suppress(GrammarError):
                    return sandbox.analyse(looser, report=report)
            raise

    def _compile(
        self,
        spec: GrammarSpec,
        finish: Callable[[PendingAnalysis], Made],
        rewritings: Rewritings | None = None,
    ) -> Made:
        """The result of `finish` for the pending analysis of the spec. Raises _NeedsSandbox if a sandbox
        exists and is needed."""
        rewritings = rewritings or self._rewritings
        if spec.kind == "json_schema":
            try:
                return self._compile_schema(spec, finish, rewritings)
            except ANALYSIS_ERRORS as error:
                raise GrammarError(
                    f"The schema cannot be analysed: {error!r}.", param=SCHEMA_PARAM
                ) from error
        name = BACKENDS_OF_KIND[spec.kind][-1]
        if spec.kind == "structure":
            backend = self._backend(name)
            return finish(structure_analysis(spec, backend, self._table, rewritings))
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
            grammar = self._backend("outlines").compile(spec)
        except GrammarError:
            if spec.backend is not None:
                raise
            return None
        return grammar if isinstance(grammar, Automaton) else None

    def _limited(self, spec: GrammarSpec, limit: ReasoningLimit, tenant: str) -> LimitedGrammar:
        """A grammar with a limit on reasoning. All limits of an equal spec share the compiled grammar."""
        inner = self.get(spec, tenant)
        if inner is None or isinstance(inner, RemoteGrammar):
            inner = self._compiled(spec, tenant)
            self.put(spec, inner, tenant)
        format = msgspec.structs.replace(limit, tokens=0, opened=False)
        tags = self._tags.get(format)
        if tags is None:
            tags = self._tags[format] = Tags(format, self._table)
        return LimitedGrammar(inner, limit, tags)

    def _compile_schema(
        self, spec: GrammarSpec, finish: Callable[[PendingAnalysis], Made], rewritings: Rewritings
    ) -> Made:
        begun = thread_time()
        written = without_ignored(parse_schema(spec.source))
        document = resolved(written)
        check_answerable(document)
        if spec.strict:
            check_spelling(written, lambda one: self._enforced(one, rewritings))
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
                        return finish(self._analyse_schema(name, spec, schema, strict=True))
                    except GrammarError as error:
                        missing = error
                if name == names[0]:
                    reason = missing
        for name, schema in ordered:  # no form is free of the schema's order
            try:
                return finish(self._analyse_schema(name, spec, schema, strict=True))
            except GrammarError as error:
                reason = error
        if spec.strict:
            spent = thread_time() - begun
            raise without_trials(written, reason, spent=spent)
        return self._compile_best_effort(spec, document, finish, tried)

    def _enforced(self, document: Schema, rewritings: Rewritings) -> bool:
        """Whether one of a schema's rewritings is enforced completely."""
        return any(
            True for _ in enforced(resolved(document), self._bytewise_backend("llguidance"), rewritings)
        )

    def _rewritings(self, document: Schema, *, any_order: bool = False) -> Iterator[Schema]:
        """Schemas equal to `document`. All but the first are made in the sandbox if there is one."""
        if self._sandbox is not None:
            yield from as_written(document)
            raise _NeedsSandbox
        yield from rewritten(document, any_order=any_order)

    def _compile_best_effort(
        self,
        spec: GrammarSpec,
        document: Schema,
        finish: Callable[[PendingAnalysis], Made],
        equal: list[Schema],
    ) -> Made:
        """Bind as much of the schema as llguidance supports, at least to JSON."""
        for schema in self._looser(document, equal):
            with suppress(GrammarError):
                return finish(self._analyse_schema("llguidance", spec, schema, strict=False))
        return finish(self._analyse_schema("llguidance", spec, True, strict=False))

    def _looser(self, document: Schema, equal: Iterable[Schema]) -> Iterator[Schema]:
        """Schemas that bind less and less of `document`. `equal` are those equal to it."""
        written = weakened(spelled(strip(document)), "llguidance")
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
            self._bytewise_backend("llguidance").compile(GrammarSpec("json_schema", text))
        except GrammarError:
            return False
        return True

    def _analyse_schema(
        self, name: str, spec: GrammarSpec, schema: Schema, *, strict: bool
    ) -> PendingAnalysis:
        bound = msgspec.structs.replace(spec, source=json.dumps(schema), strict=strict)
        return analysis_of(name, bound, self._table)

    def _build(self, pending: PendingAnalysis) -> BudgetGrammar:
        return build(pending, *self._pair(pending.compile_plan), self._table)

    def _pair(self, compile_plan: CompilePlan) -> tuple[GrammarBackend, GrammarBackend]:
        return self._backend(compile_plan.backend), self._bytewise_backend(compile_plan.backend)

    def _bytewise_backend(self, name: str) -> GrammarBackend:
        with self._backends_lock:
            if name not in self._bytewise:
                self._bytewise[name] = make_backend(name, self._table.bytewise())
            return self._bytewise[name]

    def _backend(self, name: str) -> GrammarBackend:
        with self._backends_lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, self.vocabulary)
            return self._backends[name]
