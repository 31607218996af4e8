"""What a company plays from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from personae.actors.client import ModelCard
from personae.engine.plan import MemoryLayout
from personae.engine.scheduler import Scheduler
from personae.engine.step import StepEngine
from personae.engine.tokens import Tokenizer
from personae.grammar.compiler import GrammarCompiler
from personae.lora.library import AdapterLibrary


@dataclass(frozen=True, slots=True)
class Script:
    """What a company needs to play: the engine's parts, made anew for every life of Back, and the fixed
    facts.

    `models` maps the names of the base and the adapters that are there from the start to their cards;
    `library` has every adapter by its digest.
    `salt` gives a tenant's prefix-cache salt. `max_live` bounds the sequences in the house.
    """

    build_step_engine: Callable[[], StepEngine]
    build_scheduler: Callable[[], Scheduler]
    build_compiler: Callable[[], GrammarCompiler]
    layout: MemoryLayout
    vocab_size: int
    tokenizer: Tokenizer
    models: Mapping[str, ModelCard]
    library: AdapterLibrary
    salt: Callable[[str], bytes]
    max_live: int = 4096
    window: int = 64
