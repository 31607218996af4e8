"""How long reading and placing a large adapter takes, and its longest piece; without a server.

    python -m personae.evals.tenants.placing --model models/smol135 --megabytes 100

The adapter is placed twice: from the host's memory, in pieces of which a running step can lose one, or a
fifth of its time; and from the file that an upload has on a CPU, which a thread reads in parallel with the
steps. It prints processor time as well as wall time, because on a busy machine wall time depends on other
programs.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from personae.api.bundled import DEMO
from personae.engine.config_file import read_config
from personae.evals.tenants.making import AdapterMaker
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import Adapter
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.stacking import stacked
from personae.lora.stored import KINDS, find, store


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    megabytes: Annotated[int, typer.Option(help="Size of the adapter, in float32.")] = 100,
) -> None:
    """Measure."""
    config, maker = read_config(model), AdapterMaker(model)
    shapes = LoraShapes(config.layers, config.lora_sites)
    rank = min(megabytes * 10**6 // maker.bytes_per_rank(), 512)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in maker.make(rank, 0).items():
            (Path(folder) / name).write_bytes(content)
        clock, processor = time.perf_counter(), time.thread_time()
        adapter = stacked(read_adapter(Path(folder), shapes), shapes.layers, torch.bfloat16)
        clock, processor = time.perf_counter() - clock, time.thread_time() - processor
        print(
            f"{adapter.nbytes / 1e6:.0f} MB read in {clock * 1e3:.0f} ms, "
            f"{processor * 1e3:.0f} of processor time"
        )
        pool = LoraPool(
            shapes,
            capacity_rows=-(-rank // RANK_PAGE) * RANK_PAGE,
            max_adapters=1,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        in_pieces(pool, adapter)
        pool.unload(adapter.digest)
        store(adapter, Path(folder), shapes, KINDS[pool.dtype])
        found = find(Path(folder), adapter.digest, shapes, KINDS[pool.dtype])
        assert found is not None
        clock, processor = time.perf_counter(), time.process_time()
        pool.load(found)
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
    print(f"from its file in {clock * 1e3:.0f} ms, {processor * 1e3:.0f} of processor time")


def in_pieces(pool: LoraPool, adapter: Adapter) -> None:
    """Place it from memory."""
    pieces: list[tuple[float, float]] = []
    loading = pool.loading(adapter)
    while True:
        begun = time.perf_counter(), time.thread_time()
        if next(loading, pool) is pool:
            break
        pieces.append((time.perf_counter() - begun[0], time.thread_time() - begun[1]))
    clocks, processors = zip(*pieces, strict=True)
    print(
        f"placed in {len(pieces)} pieces: {sum(clocks) * 1e3:.0f} ms, "
        f"{sum(processors) * 1e3:.0f} of processor time\n"
        f"a piece: {median(clocks) * 1e3:.2f} ms at the median, {max(clocks) * 1e3:.1f} at most, "
        f"{max(processors) * 1e3:.1f} of processor time at most"
    )


if __name__ == "__main__":
    typer.run(main)
