"""What the kernels for AVX2 bring over plain torch, on this machine held to AVX2.

    python -m personae.evals.bench.instructions --model FILE_OR_FOLDER --rounds 3

Each round loads the model in three fresh processes, in turn: with torch held to AVX2, as
a processor without AVX-512 ran before; with the fused decoder for AVX2; and with this machine's own kernels.
Prints the medians over the rounds: tokens/s of 1 and 8 streams, and the seconds until the first token after a
prompt of 512 tokens, without HTTP. On a busy machine only the ratios between the columns mean something.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import anyio

import personae

AVX2 = {"PERSONAE_CPU_INSTRUCTIONS": "x86-64-v3", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
WAYS = {
    "AVX2, torch": {
        **AVX2,
        "PERSONAE_KERNELS": "fuse=reference,pack_linear=reference,grouped_linear=reference",
    },
    "AVX2": AVX2,
    "this machine": {},
}
FIGURES = ("1 stream, tokens/s", "8 streams, tokens/s", "first token of 512, s")


async def measure(model: str, tokens: int, options: dict[str, Any]) -> list[float]:
    """FIGURES, in this process."""
    async with personae.open(model, device="cpu", **options) as engine:

        async def answer(prompt: list[int], count: int) -> None:
            await engine.complete(prompt, max_tokens=count, temperature=0, ignore_eos=True)

        await answer([5] * 20, 4)
        found = []
        for streams in (1, 8):
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for number in range(streams):
                    tasks.start_soon(answer, [10 + number] * 16, tokens)
            found.append(streams * tokens / (time.perf_counter() - began))
        began = time.perf_counter()
        await answer(list(range(100, 612)), 1)
        return [*found, time.perf_counter() - began]


def in_process(way: dict[str, str], arguments: list[str]) -> list[float]:
    """FIGURES of a fresh process."""
    command = [sys.executable, "-m", "personae.evals.bench.instructions", *arguments, "--child"]
    run = subprocess.run(command, env=os.environ | way, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  # this program
    found: list[float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        options = {"quantize": asked.quantize} if asked.quantize else {}
        print(json.dumps(anyio.run(measure, asked.model, asked.tokens, options)))
        return
    arguments = ["--model", asked.model, "--tokens", str(asked.tokens)]
    arguments += ["--quantize", asked.quantize] if asked.quantize else []
    rounds = [{name: in_process(way, arguments) for name, way in WAYS.items()} for _ in range(asked.rounds)]
    print(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for number, figure in enumerate(FIGURES):
        medians = [statistics.median(each[name][number] for each in rounds) for name in WAYS]
        print(f"| {figure} | {' | '.join(f'{median:.3g}' for median in medians)} |")


if __name__ == "__main__":
    main()
