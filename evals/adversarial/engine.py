"""An adversarial model: its favourite tokens are those that the grammar forbids.

Among the allowed tokens it prefers those that make an answer hard to end: in one answer the longest, in
another those that open brackets, blanks, digits, new members, or any at random. It stops only if nothing else
is allowed. Scheduler, grammars, masks, sampling and serving are real; the forward pass takes no time.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import torch
from torch import Tensor

from personae.actors.assembly import assemble
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.actors.spec import EngineSpec
from personae.api.app import create_app
from personae.api.http.address import bind, url
from personae.api.http.server import HttpServer
from personae.api.settings import ApiSettings
from personae.engine.sampled_tokens import SampledTokens, TokenChoices
from personae.engine.sampler import NO_VERIFICATION, Sampler
from personae.engine.sequence import SequenceLog
from personae.engine.step import StepEngine
from personae.evals.bench.paced_core import paced
from personae.grammar.matcher import Binding
from personae.grammar.vocabulary import Vocabulary

# How much a token is liked, by its text.
TASTES: dict[str, Callable[[bytes], float]] = {
    "long": len,
    "brackets": lambda text: 10 * (text.count(b"{") + text.count(b"[")) + text.count(b'"'),
    "blanks": lambda text: len(text) if text.isspace() else 0,
    "digits": lambda text: len(text) if text.strip(b"0123456789.eE+-") == b"" else 0,
    "members": lambda text: 10 * text.count(b",") + len(text),
    "chance": lambda text: 0,
}
_FORBIDDEN, _STOP = 1e6, -1e6


class _Inner(HttpServer):
    """Leaves signals to the surrounding program."""

    def capture_signals(self) -> Any:
        """None of them."""
        return nullcontext()


class Adversary:
    """Wraps a sampler. An answer's seed decides what it prefers."""

    def __init__(self, sampler: Sampler, vocabulary: Vocabulary) -> None:
        self._sampler = sampler
        self._seeds: dict[int, int] = {}
        tastes = [[taste(text) for text in vocabulary.tokens] for taste in TASTES.values()]
        self._tastes = torch.tensor(tastes, dtype=torch.float32)
        self._tastes[:, list(vocabulary.stop_ids)] = _STOP

    def admit(self, slot: int, log: SequenceLog) -> None:
        """As the sampler's."""
        self._seeds[slot] = log.params.seed
        self._sampler.admit(slot, log)

    def release(self, slot: int) -> None:
        """As the sampler's."""
        self._sampler.release(slot)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        bitmask: Tensor | None = None,
        verifications: Mapping[int, Binding] = NO_VERIFICATION,
    ) -> SampledTokens:
        """As the sampler's, with other logits."""
        self._change(logits, slots, positions, bitmask)
        return self._sampler.sample(logits, slots, positions, bitmask, verifications)

    def choose(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        bitmask: Tensor | None = None,
        verifications: Mapping[int, Binding] = NO_VERIFICATION,
    ) -> TokenChoices:
        """As the sampler's, with other logits."""
        self._change(logits, slots, positions, bitmask)
        return self._sampler.choose(logits, slots, positions, bitmask, verifications)

    def commit(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """As the sampler's."""
        self._sampler.commit(slots, tokens)

    def has_penalties(self, slot: int) -> bool:
        """As the sampler's."""
        return self._sampler.has_penalties(slot)

    def _change(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], bitmask: Tensor | None
    ) -> None:
        """Writes other logits: a function of the seed, the position and the mask."""
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            noise = np.random.default_rng((self._seeds[slot], position)).random(logits.shape[1], np.float32)
            logits[row] = self._tastes[self._seeds[slot] % len(TASTES)] + torch.from_numpy(noise)
        if bitmask is not None:
            bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")
            logits += _FORBIDDEN * (1 - torch.from_numpy(bits[:, : logits.shape[1]]))


def adversarial(engine_spec: EngineSpec, vocabulary: Vocabulary) -> EngineSpec:
    """The same engine with such a model."""
    blank = paced(engine_spec, 0.0)

    def build() -> StepEngine:
        engine: Any = blank.build_step_engine()
        engine.sampler = Adversary(engine.sampler, vocabulary)
        return cast(StepEngine, engine)  # except for its sampler

    return replace(blank, build_step_engine=build)


@asynccontextmanager
async def serving(options: EngineOptions, tool_format: str = "hermes") -> AsyncIterator[str]:
    """The URL of a server with such a model, which has the tokenizer and the sizes of a real model's
    folder."""
    assembly = await anyio.to_thread.run_sync(assemble, options)
    vocabulary = Vocabulary.from_tokenizer_json(
        (Path(options.model) / "tokenizer.json").read_bytes(),
        assembly.engine_spec.vocab_size,
        assembly.engine_spec.tokenizer().eos_ids,
    )
    async with open_in_process(adversarial(assembly.engine_spec, vocabulary)) as client:
        settings = ApiSettings(
            defaults=assembly.defaults, max_adapters=assembly.max_adapters, tool_format=tool_format
        )
        ready = anyio.Event()
        listener = bind("127.0.0.1", 0)
        server = _Inner(create_app(client, settings), settings, on_ready=ready.set)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            await ready.wait()
            try:
                yield url(listener)
            finally:
                server.should_exit = True
