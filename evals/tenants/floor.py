"""A thousand adapters compared with eight in the engine's own steps: the part that no scheduling can change.

    python -m personae.evals.tenants.floor --model models/smol135 --rounds 8

Steps of decode rows, without actors or HTTP, with all adapters on the device: rows of the base, of eight
adapters by Zipf's law, and of a thousand, in turn, with the popularity of `scale.py`. A step reads every
adapter in it once, so more adapters mean more bytes. It measures processor time on one thread, the least of
each round, and the time per prompt token, because on a shared machine wall time mainly shows which program
got a core. Together they give the time of a request.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.actors.spec import EngineSpec, StepRunner
from personae.api.bundled import DEMO
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.worker.runner import Runner
from personae.evals.tenants.making import AdapterMaker
from personae.evals.tenants.scale import FEW, RANKS, popularity, say
from personae.lora.adapter import Adapter
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes

STEPS = 16


def steps(
    engine_spec: EngineSpec, engine: StepRunner[Any, Any, Any], digests: list[str | None], prompt: int
) -> tuple[float, float]:
    """Seconds of the fastest step in which all rows decode, and of a prompt's token."""
    scheduler, decoding, prompts = engine_spec.build_scheduler(), [], []
    for row, digest in enumerate(digests):
        text = tuple((1000 + row * 977 + i * 131) % engine_spec.vocab_size for i in range(prompt))
        params = SamplingParams(max_tokens=STEPS, seed=row, temperature=0.0, ignore_eos=True)
        scheduler.add(SequenceLog(f"{row}", text, prompt, params, adapter=digest))
    while (plan := scheduler.plan()) is not None:
        prepared = engine.prepare(plan, {})
        begun = time.process_time()
        forward = engine.forward(prepared, lambda: None)
        took = time.process_time() - begun
        scheduler.commit(engine.finish(engine.sample(plan, forward)))
        tokens = sum(row.count for row in plan.rows)
        if tokens == len(plan.rows) == len(digests):
            decoding.append(took)
        elif tokens > 4 * len(digests):
            prompts.append(took / tokens)
    return min(decoding), min(prompts)


def made(maker: AdapterMaker, shapes: LoraShapes, number: int) -> Adapter:
    """The adapter with that number."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in maker.make(RANKS[number % len(RANKS)], number, torch.float16).items():
            (Path(folder) / name).write_bytes(content)
        return read_adapter(Path(folder), shapes)


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    adapters: Annotated[int, typer.Option(help="How many are asked.")] = 1000,
    rows: Annotated[int, typer.Option(help="Of a step.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 24,
    rounds: Annotated[int, typer.Option(help="Each of other adapters.")] = 6,
    targets: Annotated[str, typer.Option(help="Modules that adapters change.")] = "q,v",
    memory: Annotated[int, typer.Option(help="For adapters, in MiB; all must fit.")] = 1024,
    bfloat16: Annotated[bool, typer.Option(help="Compute in that, not in float32.")] = False,
) -> None:
    """Measure."""
    torch.set_num_threads(1)
    options = EngineOptions(
        model,
        device="cpu",
        dtype="bfloat16" if bfloat16 else "float32",
        max_seqs=rows,
        max_model_len=512,
        adapter_memory=memory * 2**20,
    )
    assembly = assemble(options)
    engine_spec, maker = assembly.engine_spec, AdapterMaker(model, tuple(targets.split(",")))
    engine = engine_spec.build_step_engine()
    assert isinstance(engine.worker, Runner)
    rng = random.Random(0)
    mixes = [
        [rng.choices(range(count), popularity(count), k=rows) for count in (FEW, adapters)]
        for _ in range(rounds)
    ]
    digests: dict[int, str] = {}
    for number in sorted({number for pair in mixes for mix in pair for number in mix}):
        adapter = made(maker, assembly.bounds.shapes, number)
        assert engine.worker.place(adapter)
        digests[number] = adapter.digest
    found: dict[str, list[tuple[float, float]]] = {"base": [], f"{FEW}": [], f"{adapters}": []}
    for pair in mixes:
        asked: list[list[str | None]] = [[None] * rows]
        asked += [[digests[n] for n in mix] for mix in pair]
        for kind, each in zip(found, asked, strict=True):
            found[kind].append(steps(engine_spec, engine, each, prompt))
    for kind, mix in zip(list(found)[1:], zip(*mixes, strict=True), strict=True):
        ranks = statistics.mean(sum(RANKS[n % len(RANKS)] for n in set(one)) for one in mix)
        say(f"{kind}: {statistics.mean(len(set(one)) for one in mix):.1f} in a step, {ranks:.0f} ranks")
    means = {
        kind: [1e3 * statistics.mean(part) for part in zip(*each, strict=True)]
        for kind, each in found.items()
    }
    for kind, (step, token) in means.items():
        say(f"{kind}: a step {step:.2f} ms, a prompt's token {token:.3f} ms")
    few, many = (means[kind] for kind in list(means)[1:])
    requests = [prompt * token + tokens * step / rows for step, token in (few, many)]
    say(
        f"{FEW} over {adapters}: step {few[0] / many[0]:.3f}, prompt {few[1] / many[1]:.3f}, "
        f"request {requests[0] / requests[1]:.3f}"
    )


if __name__ == "__main__":
    typer.run(main)
