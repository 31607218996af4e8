"""What an engine core is built from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from personae.actors.client import ModelCard
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.tiers.tier import Tier
from personae.engine.tiers.transfer import PageSource
from personae.engine.tokens import Tokenizer
from personae.engine.worker.worker import AdapterMemory
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.lora.source import AdapterSource

Prepared = TypeVar("Prepared")
Computed = TypeVar("Computed")
Launched = TypeVar("Launched")


class StepRunner(Protocol[Prepared, Computed, Launched]):
    """Runs steps: `engine.step.StepEngine`, `engine.pipelined.PipelinedEngine`, or a simulation of them.

    A step is `prepare`, `forward`, `fill`, `sample`, `finish`. What a call hands to the next one is the
    implementation's: `Prepared` on the host, `Computed` by the device, and `Launched` until it is read.
    """

    runs_ahead: bool

    @property
    def deferred(self) -> bool:
        """Whether rows are deferred because their masks are not ready yet."""

    def resumable(self) -> tuple[str, ...]:
        """The sequences whose deferred step is finished and whose masks are ready now; each is returned
        once."""

    @property
    def worker(self) -> AdapterMemory:
        """The memory that holds the adapters."""

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, Grammar], /) -> Prepared:
        """Apply the plan's changes, and do the host's work before the device begins."""

    def forward(self, prepared: Prepared, overlap: Callable[[], None], /) -> Computed:
        """Start the forward pass, and call `overlap` while it runs."""

    def fill(self, prepared: Prepared, /) -> None:
        """Make the step's masks, after the previous step has finished."""

    def sample(self, plan: StepPlan, forward: Computed, /) -> Launched:
        """Start sampling."""

    def ready(self, launched: Launched, /) -> bool:
        """Whether `finish` would return without waiting for the device."""

    def finish(self, launched: Launched, /) -> StepResult:
        """Wait for the step and read its result."""


class GrammarService(Protocol):
    """Compiles and caches grammars: `grammar.compiler.GrammarCompiler`, or a simulation of it."""

    def get(self, spec: GrammarSpec, tenant: str, /) -> Grammar | None:
        """Return a grammar from the tenant's part of the cache, or None."""

    def compile(self, spec: GrammarSpec, tenant: str, /) -> Grammar:
        """Compile a grammar. Called on a worker thread."""

    def put(self, spec: GrammarSpec, grammar: Grammar, tenant: str, /) -> None:
        """Put a grammar into the tenant's part of the cache."""


class AdapterProvider(Protocol):
    """Reads adapters to the host: `lora.library.AdapterLibrary`, or a simulation of it."""

    @property
    def kept(self) -> tuple[int, int]:
        """The number of adapters on the host, and their bytes."""

    def find(self, digest: str, /) -> AdapterSource | None:
        """Return the adapter's source if it is on the host."""

    def read(self, digest: str, /) -> AdapterSource:
        """Read the adapter from disk to the host. Called on a worker thread. Raises AdapterError."""

    def placed(self, digest: str, /) -> None:
        """The device has the adapter, and seems to have room for all: its copy on the host may be dropped.
        Called on a worker thread."""

    def forget_offered(self) -> None:
        """Forget the sources returned so far: their users are gone."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine core is built from: functions that build the engine's parts anew for every epoch, and
    fixed facts.

    `models` maps the names of the base and of the adapters known from the start to their cards. `tokenizer`
    returns the model's, for a frontend in this process. `library` has every adapter by its digest. `salt`
    returns a tenant's prefix-cache salt. `max_live` bounds the sequences that are served at once. `late`:
    plan the next step when the running one is about to end, not as soon as it has begun. `steps_at_once`: the
    device works on so many steps at the same time, as stages do, and their rows are those of different
    sequences. `build_kv_events` makes the recorder of the prefix cache's events; None: they are not recorded.
    `tier` keeps KV pages for which the device has no room; it outlives an epoch. `page_source` gives pages to
    other engines.
    """

    build_step_engine: Callable[[], StepRunner[Any, Any, Any]]
    build_scheduler: Callable[[], Scheduler]
    build_compiler: Callable[[], GrammarService]
    layout: MemoryLayout
    vocab_size: int
    tokenizer: Callable[[], Tokenizer]
    models: Mapping[str, ModelCard]
    library: AdapterProvider
    salt: Callable[[str], bytes]
    max_live: int = 4096
    window: int = 64
    late: bool = False
    steps_at_once: int = 1
    build_kv_events: Callable[[], KVEventRecorder] | None = None
    tier: Tier | None = None
    page_source: PageSource | None = None
