"""Every Triton kernel, compiled ahead of time for Ampere and Hopper at the shapes of Llama 3.1 8B.

What can be known without a GPU: it compiles, fits into a multiprocessor's shared memory, no register is
spilled, products run on tensor cores (HMMA; HGMMA where the tile is large enough for Hopper's), and loads are
16 bytes wide.
"""

import os
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from personae.kernels.attention import AttentionBatch
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import RankTable, WeightPool, WorkList

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
GROUPS = {"qkv": (4096, (4096, 1024, 1024)), "down": (14336, (4096,))}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


class OneStream:
    """A branch that is none."""

    fork = staticmethod(nullcontext)

    def join(self) -> None:
        pass


@pytest.mark.parametrize(
    ("group", "tokens", "capability", "overlap"),
    [
        ("qkv", 64, 80, True),
        ("qkv", 64, 90, False),
        ("down", 64, 90, True),
        ("qkv", 2048, 80, False),
        ("qkv", 2048, 90, False),
    ],
)
def test_sgmv_runs_on_tensor_cores_without_spills(
    group: str, tokens: int, capability: int, overlap: bool, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.sgmv import SIDE_STREAM_PROGRAMS, begin_sgmv, sgmv
    from personae.kernels.triton.sizes import Gpu

    inputs, outputs = GROUPS[group]
    weight_pools = tuple(WeightPool(meta(4096, inputs), meta(4096, out)) for out in outputs)
    tables = tuple(RankTable(ints(64), ints(64, 32)) for _ in outputs)
    ys = meta(tokens, sum(outputs)).split(list(outputs), dim=1)
    x, work, gpu = (
        meta(tokens, inputs),
        WorkList(ints(64), ints(64), ints(64)),
        Gpu(132, hopper=capability == 90),
    )
    with launches() as found:
        if overlap:
            begin_sgmv(x, weight_pools, tables, work, OneStream(), gpu)(ys)
        else:
            sgmv(x, ys, weight_pools, tables, work, gpu)
    plan, shrink, expand = (compiled(launch, capability, tmp_path) for launch in found)
    for machine in (plan, shrink, expand):
        print(tokens, group, capability, machine)
        assert machine.stack == machine.spills == 0
    product = "HGMMA" if capability == 90 and tokens > 64 else "HMMA"
    # Pipelined, these could go wrong for float16 before ptxas 13.3; the same code is made for it.
    assert shrink.register_products == 0
    assert found[2].options["num_stages"] == 1
    for machine in (shrink, expand):
        assert machine.instructions[product]
        assert machine.wide_loads >= 6  # of x, of A or B, of y
        assert machine.registers <= (
            128 if tokens <= 64 else 255
        )  # 128: four programs fit on a multiprocessor
    if overlap:  # a product has half of a multiprocessor's registers, and what is left of its shared memory
        assert SIDE_STREAM_PROGRAMS * 128 * shrink.registers <= 65536 // 2
        assert SIDE_STREAM_PROGRAMS * (shrink.shared + 1024) <= 48 << 10
    # On Hopper expand begins beside the shrink that it follows, and waits for it when the adapters' weights
    # are on their way.
    early = capability == 90 and not overlap
    assert found[2].options["launch_pdl"] == early
    assert ("griddepcontrol.launch_dependents" in shrink.assembly) == (capability == 90)
    waits = expand.assembly.split("griddepcontrol.wait")
    assert len(waits) == (4 if early else 1)  # row by row, in tiles, at the end
    for before in waits[:-2]:
        assert re.findall(r"ld\.global\S*", before)[-1] == "ld.global.v4.b32"


@pytest.mark.parametrize(
    ("max_query", "dtype", "window", "capability"),
    [
        (1, torch.bfloat16, None, 80),
        (1, torch.bfloat16, None, 90),
        (512, torch.bfloat16, None, 80),
        (512, torch.bfloat16, 1024, 90),
        (512, torch.float16, None, 90),
    ],
    ids=str,
)
def test_attention_runs_on_tensor_cores_without_spills(
    max_query: int, dtype: torch.dtype, window: int | None, capability: int, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.attention import TritonAttention
    from personae.kernels.triton.sizes import Gpu

    caches = meta(2, 4096, 8, 16, 128, dtype=dtype)
    batch = AttentionBatch(ints(65), ints(64), ints(64, 512), ints(64), max_query, max_kv=8192)
    q = meta(63 + max_query, 6144, dtype=dtype)[:, :4096].view(-1, 32, 128)
    with launches() as found:
        TritonAttention(Gpu(132, hopper=capability == 90))(q, caches[0], caches[1], batch, 0.1, window)
    attention, merge = (compiled(launch, capability, tmp_path) for launch in found)
    for machine in (attention, merge):
        print(max_query, dtype, window, capability, machine)
        assert machine.stack == machine.spills == 0
    assert attention.instructions["HGMMA" if capability == 90 and max_query > 1 else "HMMA"]
    assert attention.wide_loads >= 8
    if max_query == 1:  # blocks of 64 keys and values: one is computed, on Hopper another is on its way
        assert attention.shared >= (2 if capability == 90 else 1) * 2 * 64 * 128 * dtype.itemsize
    if attention.register_products and dtype is torch.float16:  # see `tile_for`
        assert found[0].options["num_stages"] == 1
    if capability == 90 and max_query > 1:
        assert attention.register_products  # else the line above tests nothing
    if capability == 90 and dtype is torch.bfloat16 and max_query > 1:
        assert found[0].options["num_stages"] > 1


@pytest.mark.parametrize("capability", [80, 90])
def test_prompts_of_models_with_large_heads_compile_without_spills(capability: int, tmp_path: Path) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.attention import TritonAttention
    from personae.kernels.triton.sizes import Gpu

    caches = meta(2, 4096, 4, 16, 256)  # Gemma 3
    batch = AttentionBatch(ints(65), ints(64), ints(64, 512), ints(64), max_query=512, max_kv=8192)
    with launches() as found:
        gpu = Gpu(132, hopper=capability == 90)
        TritonAttention(gpu)(meta(575, 8, 256), caches[0], caches[1], batch, 0.1, 1024)
    machine = compiled(found[0], capability, tmp_path)
    assert machine.stack == machine.spills == 0
    assert machine.instructions["HGMMA" if capability == 90 else "HMMA"]


@pytest.mark.parametrize("capability", [89, 100, 120], ids=["L40S", "B200", "RTX 50"])
def test_what_takes_most_shared_memory_compiles_for_other_gpus_and_fits(
    capability: int, tmp_path: Path
) -> None:
    """An L40S has less than two thirds of what an A100 has."""
    from triton_aot import compiled, launches

    from personae.kernels.triton.attention import TritonAttention
    from personae.kernels.triton.sgmv import sgmv
    from personae.kernels.triton.sizes import Gpu

    gpu = Gpu(142, hopper=False)
    inputs, outputs = GROUPS["qkv"]
    weight_pools = tuple(WeightPool(meta(4096, inputs), meta(4096, out)) for out in outputs)
    tables = tuple(RankTable(ints(64), ints(64, 32)) for _ in outputs)
    with launches() as found:
        for heads, kv_heads, dim in ((32, 8, 128), (8, 4, 256)):  # Llama 3.1 8B, Gemma 3
            caches = meta(2, 4096, kv_heads, 16, dim)
            for most in (1, 512):
                batch = AttentionBatch(ints(65), ints(64), ints(64, 512), ints(64), most, max_kv=8192)
                TritonAttention(gpu)(meta(63 + most, heads, dim), caches[0], caches[1], batch, 0.1, 1024)
        for tokens in (64, 2048):
            ys = meta(tokens, sum(outputs)).split(list(outputs), dim=1)
            sgmv(meta(tokens, inputs), ys, weight_pools, tables, WorkList(ints(64), ints(64), ints(64)), gpu)
    for launch in found:
        if launch.kernel.__name__ in ("attention_kernel", "shrink_kernel", "expand_kernel"):
            print(capability, compiled(launch, capability, tmp_path))  # which asserts that it fits


@pytest.mark.parametrize("max_query", [1, 512])
def test_a_cache_of_fp8_compiles_for_hopper_without_spills(max_query: int, tmp_path: Path) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.reference import FP8
    from personae.kernels.triton import pointwise
    from personae.kernels.triton.attention import TritonAttention
    from personae.kernels.triton.sizes import Gpu

    caches = meta(2, 4096, 8, 16, 128, dtype=FP8)
    batch = AttentionBatch(ints(65), ints(64), ints(64, 512), ints(64), max_query, max_kv=8192)
    q, k = meta(63 + max_query, 32, 128), meta(64, 8, 128)
    with launches() as found:
        TritonAttention(Gpu(132, hopper=True))(q, caches[0], caches[1], batch, 0.1, None)
        pointwise.append_kv(k, k, caches[0], caches[1], meta(64, dtype=torch.int64))
    for launch in found:
        machine = compiled(launch, 90, tmp_path)
        print(max_query, machine)
        assert machine.stack == machine.spills == 0
    attention, append = (compiled(launch, 90, tmp_path) for launch in (found[0], found[-1]))
    assert attention.instructions["HGMMA" if max_query > 1 else "HMMA"]
    assert append.instructions["F2FP"]  # rounded by the processor, two at a time


@pytest.mark.parametrize("capability", [80, 90])
def test_what_lies_between_the_products_compiles_without_spills(capability: int, tmp_path: Path) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton import pointwise

    qkv = meta(64, 6144)
    q, k, v = qkv[:, :4096].view(64, 32, 128), *(part.view(64, 8, 128) for part in qkv[:, 4096:].chunk(2, 1))
    tables = meta(8192, 64, dtype=torch.float32)
    caches = meta(2, 4096, 8, 16, 128)
    with launches() as found:
        pointwise.rms_norm(meta(64, 4096), meta(64, 4096), meta(4096, dtype=torch.float32), 1e-5)
        pointwise.rotary(q, k, meta(64, dtype=torch.int64), tables, tables)
        pointwise.act_and_mul(meta(64, 28672), gelu=False)
        pointwise.act_and_mul(meta(64, 28672), gelu=True)
        pointwise.append_kv(k, v, caches[0], caches[1], meta(64, dtype=torch.int64))
    assert len(found) == 5
    for launch in found:
        machine = compiled(launch, capability, tmp_path)
        print(capability, machine)
        assert machine.stack == machine.spills == 0
        assert machine.wide_loads or machine.name == "rotary_kernel"  # a warp's 4 heads of 64 halves: 8 bytes


@pytest.mark.parametrize(("capability", "vocabulary"), [(80, 128_256), (90, 128_256), (90, 151_936)])
def test_sampling_compiles_without_spills(capability: int, vocabulary: int, tmp_path: Path) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.sampling import choose

    rows = SamplingRows(
        np.ones(64, np.float32),
        np.full(64, 20),
        np.full(64, 0.9),
        np.zeros(64, np.float32),
        np.zeros(64, np.uint64),
        np.zeros(64, np.int64),
    )
    words = torch.zeros(64, vocabulary // 32, dtype=torch.int32)
    with launches() as found:
        choose(meta(64, vocabulary, dtype=torch.float32), rows, words)
    greatest, weigh, gather, draw = (compiled(launch, capability, tmp_path) for launch in found)
    for machine in (greatest, weigh, gather, draw):
        print(capability, machine)
        assert machine.spills == 0
        assert machine.stack <= 8  # ptxas sets it aside for Hopper, and nothing reads or writes it
        assert machine.wide_loads
    assert max(greatest.registers, weigh.registers) <= 64
    assert gather.registers <= 80
    assert draw.registers <= 128  # of 16 warps


@pytest.mark.parametrize(("rows", "capability"), [(64, 80), (64, 90), (4096, 80), (4096, 90)])
def test_the_products_of_experts_run_on_tensor_cores_without_spills(
    rows: int, capability: int, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.triton.moe import expert_linear

    with launches() as found:
        expert_linear(meta(rows, 2048), meta(128, 1536, 2048), ints(129))  # Qwen3-30B-A3B
    machine = compiled(found[0], capability, tmp_path)
    print(rows, capability, machine)
    assert machine.stack == machine.spills == 0
    assert machine.instructions["HGMMA" if capability == 90 and rows > 2048 else "HMMA"]
    assert machine.wide_loads >= 4


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["int8", "int4", "Q4_K", "Q6_K"])
def test_products_with_weights_in_fewer_bits_run_on_tensor_cores_without_spills(
    kind: str, rows: int, capability: int, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.engine.quantization import method_of
    from personae.engine.quantization.int4 import Int4Weight
    from personae.kernels.decoder import LinearWeights
    from personae.kernels.triton.quantized import pack_linear

    kept = Int4Weight if kind == "int4" else method_of(kind).kept  # type: ignore[attr-defined]  # quantized
    weight = kept.empty(28672, 4096, torch.device("meta"))
    product = pack_linear(LinearWeights(weight, None), torch.bfloat16)
    assert product is not None
    with launches() as found:
        product(meta(rows, 4096))
    machine = compiled(found[0], capability, tmp_path)
    print(kind, rows, capability, machine)
    assert machine.stack == machine.spills == 0
    assert machine.instructions["HGMMA" if capability == 90 and rows > 16 else "HMMA"]
    assert machine.wide_loads >= 4


@pytest.mark.parametrize("fences", [True, False])
def test_kernels_are_pipelined_on_hopper_only_where_triton_places_the_fences(
    fences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_aot import launches

    from personae.kernels.triton import attention, moe, sgmv
    from personae.kernels.triton.sizes import Gpu

    for module in (attention, moe, sgmv):
        monkeypatch.setattr(module, "FENCES", fences)
    hopper, stages = Gpu(132, hopper=True), 3 if fences else 1
    assert attention.tile_for(64, 4, 128, torch.bfloat16, hopper).stages == stages
    with launches() as found:
        moe.expert_linear(meta(4096, 2048), meta(128, 1536, 2048), ints(129))
        moe.expert_linear(meta(16, 2048), meta(128, 1536, 2048), ints(129))
    assert [launch.options["num_stages"] for launch in found] == [stages, 3]


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_over_latent_vectors_runs_on_tensor_cores_without_spills(
    capability: int, tmp_path: Path
) -> None:
    from triton_aot import compiled, launches

    from personae.kernels.latent_attention import LatentPlan
    from personae.kernels.triton.latent_attention import latent_attention
    from personae.kernels.triton.sizes import Gpu

    rows = 4
    batch = AttentionBatch(
        query_start=ints(rows + 1),
        kv_length=ints(rows),
        page_table=ints(rows, 64),
        write_index=meta(rows, dtype=torch.int64),
        max_query=1,
        max_kv=4096,
        host=(np.arange(rows + 1), np.full(rows, 4096)),
    )
    plan = LatentPlan(batch, 512, 256)  # DeepSeek V3
    with launches() as found:
        latent_attention(meta(rows, 128, 576), meta(2048, 1, 64, 576), plan, 0.1, Gpu(132, capability == 90))
    attend, merge = (compiled(launch, capability, tmp_path) for launch in found)
    for machine in (attend, merge):
        print(capability, machine)
        assert machine.stack == machine.spills == 0
    assert attend.instructions["HMMA"]
    assert attend.wide_loads >= 4
