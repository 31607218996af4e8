"""Holds compiled grammars."""

from collections import OrderedDict
from threading import Lock

from personae.grammar.matcher import Grammar
from personae.grammar.size_estimate import size_estimate
from personae.grammar.spec import GrammarKey, GrammarSpec


class GrammarCache:
    """Compiled grammars by tenant and spec. When they have more than `most_bytes`, the least recently used
    are dropped. Answers that are bound by one keep it. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._grammars: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._sizes: dict[GrammarKey, int] = {}
        self._bytes = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of all, including the estimated growth."""
        return self._bytes

    def get(self, spec: GrammarSpec, tenant: str = "") -> Grammar | None:
        """The compiled grammar of an equal spec of this tenant. None if there is none."""
        key = (tenant, spec)
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None and grammar.ended:
                self._drop(key)
                return None
            if grammar is not None:
                self._grammars.move_to_end(key)
            return grammar

    def put(self, spec: GrammarSpec, grammar: Grammar, tenant: str = "") -> None:
        """Add a grammar, unless it alone has too many bytes."""
        nbytes = grammar.nbytes + (size_estimate(spec) if grammar.grows else 0)
        key = (tenant, spec)
        with self._lock:
            if key in self._grammars or nbytes > self._most_bytes:
                return
            self._grammars[key] = grammar
            self._sizes[key] = nbytes
            self._bytes += nbytes
            while self._bytes > self._most_bytes:
                self._drop(next(iter(self._grammars)))

    def drop_processes(self, tenant: str | None) -> None:
        """Drop the processes that make masks and bind no answer: those of a tenant, or all."""
        with self._lock:
            for key, grammar in [*self._grammars.items()]:
                if grammar.idle and tenant in (None, key[0]):
                    self._drop(key)

    def _drop(self, key: GrammarKey) -> None:
        del self._grammars[key]
        self._bytes -= self._sizes.pop(key)
