"""A simulated grammar library: compiling takes virtual time."""

from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.trouble import Costs, Trouble, Wrong
from personae.errors import Overloaded
from personae.grammar.backend import BoundGrammar
from personae.grammar.matcher import Grammar, Matcher
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.spec import GrammarKey, GrammarSpec


class SimulatedGrammar(BoundGrammar):
    """A compiled grammar that only knows whose it is."""

    nbytes = 1
    shortest = 1

    def __init__(self, spec: GrammarSpec, tenant: str) -> None:
        self.key = tenant, spec

    def matcher(self, budget: int | None = None) -> Matcher:
        """Fail: the simulated device samples by itself."""
        raise Wrong("a simulated device was asked what a grammar allows")


class SimulatedGrammars:
    """Implements `actors.spec.GrammarService` with a cache of `keep` grammars."""

    def __init__(self, costs: Costs, threads: SimulationThreads, trouble: Trouble, keep: int = 64) -> None:
        self._costs = costs
        self._threads = threads
        self._trouble = trouble
        self._keep = keep
        self._cache: dict[GrammarKey, Grammar] = {}

    def get(self, spec: GrammarSpec, tenant: str) -> Grammar | None:
        """Return a grammar from the cache, or None."""
        return self._cache.get((tenant, spec))

    def compile(self, spec: GrammarSpec, tenant: str) -> Grammar:
        """Compile, which takes time, but no longer than a sandbox's limit."""
        seconds = self._trouble.slowed(self._costs.compile)
        self._threads.sleep(min(seconds, SandboxLimits().patience))
        if seconds > SandboxLimits().patience:
            raise Overloaded("The grammar could not be compiled in time.")
        self._trouble.compiles(spec)
        return SimulatedGrammar(spec, tenant)

    def put(self, spec: GrammarSpec, grammar: Grammar, tenant: str) -> None:
        """Put a grammar into the cache. The oldest ones are dropped."""
        self._cache[tenant, spec] = grammar
        while len(self._cache) > self._keep:
            del self._cache[next(iter(self._cache))]
