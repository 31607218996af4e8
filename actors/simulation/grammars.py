"""The grammar library of a simulation: what it compiles takes virtual time."""

from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.trouble import Costs, Trouble, Wrong
from personae.errors import Overloaded
from personae.grammar.backend import Matcher
from personae.grammar.sandbox.masks import AnyGrammar
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.spec import GrammarKey, GrammarSpec


class SimulatedGrammar:
    """A compiled grammar that only knows whose it is."""

    nbytes = 1
    shortest = 1

    def __init__(self, spec: GrammarSpec, tenant: str) -> None:
        self.key = tenant, spec

    def matcher(self, budget: int | None = None) -> Matcher:
        """A simulation samples by itself."""
        raise Wrong("a simulated device was asked what a grammar allows")


class SimulatedGrammars:
    """`actors.spec.GrammarService` with a cache of `keep` grammars."""

    def __init__(self, costs: Costs, threads: SimulationThreads, trouble: Trouble, keep: int = 64) -> None:
        self._costs = costs
        self._threads = threads
        self._trouble = trouble
        self._keep = keep
        self._cache: dict[GrammarKey, AnyGrammar] = {}

    def get(self, spec: GrammarSpec, tenant: str) -> AnyGrammar | None:
        """From the cache."""
        return self._cache.get((tenant, spec))

    def compile(self, spec: GrammarSpec, tenant: str) -> AnyGrammar:
        """Takes its time, but no more than a sandbox has patience."""
        seconds = self._trouble.slowed(self._costs.compile)
        self._threads.sleep(min(seconds, SandboxLimits().patience))
        if seconds > SandboxLimits().patience:
            raise Overloaded("The grammar could not be compiled in time.")
        self._trouble.compiles(spec)
        return SimulatedGrammar(spec, tenant)

    def put(self, spec: GrammarSpec, grammar: AnyGrammar, tenant: str) -> None:
        """Into the cache; the oldest leave."""
        self._cache[tenant, spec] = grammar
        while len(self._cache) > self._keep:
            del self._cache[next(iter(self._cache))]
