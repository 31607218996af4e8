"""A model on ranks and the same model in one process: the same tokens, and how long a step takes.

    python -m personae.evals.parallel MODEL [--adapters DIR] [--sizes 2,1x2,2x2] [--dtype float32]

A size is the number of ranks that share each layer. 2x3 has three stages of two ranks each, and 4e2 has two
groups of experts among four ranks. 2a2 has attention for sequences of its own on both ranks, and 2a1 on one,
with the MLPs on the other. With an h at the end, as in 2a1h, the halves of a step take turns. With a g, as in
2g, gloo carries what ranks exchange. A size that ends with ! has one step in the stages at a time, to
compare.
For each size the program assembles an engine as a server does, and plays one batch: the base and every
adapter, 64 greedy tokens and 64 drawn ones each; with `--copies` so many times, with other prompts. The
tokens must be those of one process in float32; in
bfloat16 they differ where two tokens are nearly equally likely. Then the engines play the same batch in
alternation. Printed is the time in which each sequence gets one more token, in the mean of a round: the
median round and the fastest one.
"""

import argparse
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.params import SamplingParams
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
from personae.lora.stored import finished

TOKENS = 64


class Engine:
    """An engine without actors, with all its adapters on the device. `at_once`: so many steps are in its
    stages at the same time."""

    def __init__(self, options: EngineOptions, at_once: int, copies: int) -> None:
        self.spec = assemble(options).engine_spec
        # The engine of a server, which a `StepRunner` describes only as far as the executor needs it.
        self.engine: Any = self.spec.build_step_engine()
        self.at_once, self.copies = at_once, copies
        self.scheduler = Scheduler(self.spec.layout, VirtualTokenCounters(), micro_batches=at_once)
        self.adapters = [card.adapter for card in self.spec.models.values() if card.adapter is not None]
        for digest in self.adapters:
            source = self.spec.library.find(digest) or self.spec.library.read(digest)
            finished(self.engine.worker.load_adapter(digest, source).pieces())

    def play(self, round_: int) -> tuple[dict[str, list[int]], float]:
        """The tokens of each sequence, and the mean seconds from one token of all sequences to the next."""
        found: dict[str, list[int]] = {}
        for number, adapter in enumerate([None, *self.adapters] * self.copies):
            prompt = tuple(random.Random(number).choices(range(10, self.spec.vocab_size), k=24))
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5, ignore_eos=True)
                log = SequenceLog(
                    f"{round_} {number} {temperature}", prompt, len(prompt), params, adapter=adapter
                )
                found[log.id] = []
                self.scheduler.add(log, speculates=False)
        launched: deque[Any] = deque()
        begun, first = 0.0, 0
        while True:
            if (plan := self.scheduler.plan()) is not None:
                forward = self.engine.forward(self.engine.prepare(plan, {}), lambda: None)
                launched.append(self.engine.sample(plan, forward))
            elif not launched:
                break
            while launched and (plan is None or len(launched) >= self.at_once):
                for delta in self.scheduler.commit(self.engine.finish(launched.popleft())):
                    found[delta.id] += delta.tokens
                if not begun and all(found.values()):
                    begun, first = time.perf_counter(), sum(map(len, found.values()))
        tokens = sum(map(len, found.values())) - first
        seconds = (time.perf_counter() - begun) * len(found) / tokens
        return {id.partition(" ")[2]: tokens for id, tokens in found.items()}, seconds


def sizes_of(text: str) -> dict[str, Any]:
    """The options of a size such as 2, 1x2, 4e2 or 2a1h."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?(?:e(\d+))?(?:a(\d+))?(h?)(g?)!?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 2, 1x2, 1x2!, 4e2, 2a1, 2h or 2g")
    ranks, stages, groups = (int(size or 1) for size in found.group(1, 2, 3))
    attention = int(found[4] or 0)
    return {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": stages,
        "expert_parallel_size": groups,
        "enable_dp_attention": attention > 0,
        "attention_ranks": attention if 0 < attention < ranks else None,
        "enable_two_batch_overlap": bool(found[5]),
        "dist_backend": "gloo" if found[6] else "auto",
    }


def main(arguments: Sequence[str]) -> int:
    """Run the program. Returns 1 if tokens differ in float32."""
    parser = argparse.ArgumentParser(prog="personae.evals.parallel")
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=Path)
    parser.add_argument("--sizes", default="2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=1)
    asked = parser.parse_args(arguments)
    sizes = ["1", *asked.sizes.split(",")]
    adapters = () if asked.adapters is None else (asked.adapters,)
    engines = {
        size: Engine(
            EngineOptions(
                asked.model,
                adapters,
                device="cpu",
                dtype=asked.dtype,
                quantize=asked.quantize,
                kv_memory=2**28,
                speculate="off",
                **sizes_of(size),
            ),
            1 if size.endswith("!") else sizes_of(size)["pipeline_parallel_size"],
            asked.copies,
        )
        for size in sizes
    }
    tokens: dict[str, dict[str, list[int]]] = {}
    seconds: dict[str, list[float]] = {size: [] for size in sizes}
    for round_ in range(asked.rounds):
        for size, engine in engines.items():
            tokens[size], each = engine.play(round_)
            seconds[size].append(each)
    differ = 0
    for size in sizes:
        same = sum(tokens[size][id] == tokens["1"][id] for id in tokens["1"])
        differ += len(tokens["1"]) - same
        step = 1000 * statistics.median(seconds[size])
        print(  # the program's result
            f"{size} ranks: {same} of {len(tokens['1'])} sequences equal, a token of each sequence "
            f"takes {step:.2f} ms (fastest round {1000 * min(seconds[size]):.2f})"
        )
    return int(asked.dtype == "float32" and differ > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
