"""The disk and the grammar library of a simulation: what they read and compile takes virtual time."""

from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.trouble import Costs, Trouble, Wrong
from personae.errors import Overloaded
from personae.grammar.backend import Matcher
from personae.grammar.sandbox.masks import AnyGrammar
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.lora.adapter import Adapter


class SimulatedAdapters:
    """`actors.script.Library`: every digest is an adapter; the first read of each takes time."""

    def __init__(self, costs: Costs, threads: SimulationThreads, trouble: Trouble, keep: int) -> None:
        self._costs = costs
        self._threads = threads
        self._trouble = trouble
        self._keep = keep
        self._host: dict[str, Adapter] = {}

    @property
    def kept(self) -> tuple[int, int]:
        """Adapters on the host, and their bytes."""
        return len(self._host), len(self._host)

    def get(self, digest: str) -> Adapter | None:
        """The adapter if it is on the host."""
        return self._host.get(digest)

    def read(self, digest: str) -> Adapter:
        """From a disk that takes its time."""
        self._threads.sleep(self._trouble.slowed(self._costs.read))
        self._trouble.reads(digest)
        return Adapter(digest, digest, {}, {"q": 8}, 1.0, 1)

    def put(self, adapter: Adapter) -> None:
        """Keep it; the oldest leave."""
        self._host[adapter.digest] = adapter
        while len(self._host) > self._keep:
            del self._host[next(iter(self._host))]


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
    """`actors.script.Grammars` with a cache of `keep` grammars."""

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
