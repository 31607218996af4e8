"""What a company plays from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from personae.actors.client import ModelCard
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.tokens import Tokenizer
from personae.engine.worker.worker import AdapterMemory
from personae.grammar.sandbox.masks import AnyGrammar
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.lora.source import AdapterSource


class StepRunner(Protocol):
    """What runs steps: `engine.step.StepEngine`, or a simulation of it.

    A step is `prepare`, `forward`, `fill`, `sample`, `finish`; what travels between them is the device's own.
    """

    runs_ahead: bool

    @property
    def deferred(self) -> bool:
        """Whether rows sit out since their masks are still being made."""

    def resumable(self) -> tuple[str, ...]:
        """The sequences that sat a step out that is finished, and whose masks have come since; each once."""

    @property
    def worker(self) -> AdapterMemory:
        """Where the adapters are."""

    def prepare(self, plan: StepPlan, grammars: Mapping[GrammarKey, AnyGrammar], /) -> Any:
        """Apply the plan's changes; all that the host does for a step before the device begins."""

    def forward(self, prepared: Any, overlap: Callable[[], None], /) -> Any:
        """Start the forward pass, and call `overlap` while it runs."""

    def fill(self, prepared: Any, /) -> None:
        """Make its masks, when the step before is finished."""

    def sample(self, plan: StepPlan, forward: Any, /) -> Any:
        """Start sampling."""

    def ready(self, launched: Any, /) -> bool:
        """Whether `finish` would not wait for the device."""

    def finish(self, launched: Any, /) -> StepResult:
        """Wait for the step and read it."""


class GrammarService(Protocol):
    """What compiles grammars and keeps them: `grammar.compiler.GrammarCompiler`, or a simulation of it."""

    def get(self, spec: GrammarSpec, tenant: str, /) -> AnyGrammar | None:
        """From the tenant's part of the cache."""

    def compile(self, spec: GrammarSpec, tenant: str, /) -> AnyGrammar:
        """Compile; on a worker thread."""

    def put(self, spec: GrammarSpec, grammar: AnyGrammar, tenant: str, /) -> None:
        """Into the tenant's part of the cache."""


class AdapterProvider(Protocol):
    """Brings adapters to the host: `lora.library.AdapterLibrary`, or a simulation of it."""

    @property
    def kept(self) -> tuple[int, int]:
        """Adapters on the host, and their bytes."""

    def find(self, digest: str, /) -> AdapterSource | None:
        """Where the adapter lies, if it is on the host."""

    def read(self, digest: str, /) -> AdapterSource:
        """Have the adapter on the host, from disk; on a worker thread. Raises AdapterError."""

    def forget_offered(self) -> None:
        """Nobody will ask for what was found or read so far."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a company needs to play: the engine's parts, made anew for every epoch of the engine core, and the
    fixed facts.

    `models` maps the names of the base and the adapters that are there from the start to their cards;
    `library` has every adapter by its digest.
    `salt` gives a tenant's prefix-cache salt. `max_live` bounds the sequences that are served at
    once. `late`: plan the next step when the one that runs is about to end, not as soon as it has begun.
    `build_kv_events` makes what records the prefix cache's events; None if nobody wants them.
    """

    build_step_engine: Callable[[], StepRunner]
    build_scheduler: Callable[[], Scheduler]
    build_compiler: Callable[[], GrammarService]
    layout: MemoryLayout
    vocab_size: int
    tokenizer: Tokenizer
    models: Mapping[str, ModelCard]
    library: AdapterProvider
    salt: Callable[[str], bytes]
    max_live: int = 4096
    window: int = 64
    late: bool = False
    build_kv_events: Callable[[], KVEventRecorder] | None = None
