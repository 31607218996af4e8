"""From spec to compiled grammar, with a cache. The actor above shares compiles that are in flight.

`compile` may run on any number of threads at once; `get` and `put` are quick and may be called from anywhere.
"""

from collections import OrderedDict
from threading import Lock

from personae.grammar.backend import CompiledGrammar
from personae.grammar.registry import make_backend
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary


class GrammarCompiler:
    """Compiled grammars of one tokenizer; the least recently used leave when the cache is over its bytes."""

    def __init__(self, vocabulary: Vocabulary, *, cache_bytes: int = 256 * 2**20) -> None:
        self._backend = make_backend("xgrammar", vocabulary)
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    @property
    def cached_bytes(self) -> int:
        """Bytes held by the cache."""
        return self._bytes

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile without looking at the cache. Raises GrammarError when the spec cannot be enforced."""
        return self._backend.compile(spec)

    def get(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """The compiled grammar of an equal spec, if it is in the cache."""
        with self._lock:
            grammar = self._cached.get(spec)
            if grammar is not None:
                self._cached.move_to_end(spec)
            return grammar

    def put(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        """Keep a compiled grammar, unless it alone is over the cache's bytes."""
        with self._lock:
            if spec in self._cached or grammar.nbytes > self._cache_bytes:
                return
            self._cached[spec] = grammar
            self._bytes += grammar.nbytes
            while self._bytes > self._cache_bytes:
                _, evicted = self._cached.popitem(last=False)
                self._bytes -= evicted.nbytes
