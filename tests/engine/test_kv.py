import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from paged import PagedSequences
from small_pools import Granules
from tiny_models import VOCAB, model_folder

from personae.engine.config_file import read_config
from personae.engine.kv import KVCache, pages_of_a_run
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import KVSpec
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.kernels.reference import FP8

LAYOUT = MemoryLayout(num_pages=6, page_size=4, max_seqs=2, max_model_len=16, max_batch_tokens=16)


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(read_config(model_folder("mistral")).kv_specs, LAYOUT, dtype, torch.device("cpu"))


def test_the_layers_are_views_of_one_tensor() -> None:
    kv = cache()
    assert kv.data.shape == (3, 2, 6, 2, 4, 24)
    keys, values = kv.layers[1]
    keys.fill_(1)
    values.fill_(2)
    assert torch.equal(kv.data[1, 0], keys)
    assert torch.equal(kv.data[1, 1], values)
    assert not kv.data[0].any()
    assert not kv.data[2].any()


def test_copying_a_page_copies_it_in_all_layers_and_nothing_else() -> None:
    kv = cache()
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    before = kv.data.clone()
    kv.copy_pages([(4, 1), (1, 0)])
    assert torch.equal(kv.data[:, :, 1], before[:, :, 4])
    assert torch.equal(kv.data[:, :, 0], before[:, :, 4])
    assert torch.equal(kv.data[:, :, 2:], before[:, :, 2:])


@pytest.mark.parametrize("granule", [0, 2**14])
def test_the_content_of_pages_is_the_same_in_any_order_of_the_memory(granule: int) -> None:
    specs = read_config(model_folder("mistral")).kv_specs
    memory = Granules(granule, free=100) if granule else None
    kv = KVCache(specs, LAYOUT, torch.float32, torch.device("cpu"), memory=memory)
    layered = cache()
    for cached in (kv, layered):
        cached.data.copy_(torch.arange(kv.data.numel()).view(kv.data.shape))
    content = kv.read_pages([4, 1])
    assert content.shape == (2, kv.content_bytes)
    assert torch.equal(content, layered.read_pages([4, 1]))
    before = kv.data.clone()
    kv.write_pages([0, 5], content)
    assert torch.equal(kv.data[:, :, [0, 5]], before[:, :, [4, 1]])
    assert torch.equal(kv.data[:, :, 1:5], before[:, :, 1:5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_of_fp8_takes_a_byte_a_number_and_gives_nearly_the_same_logits(dtype: str) -> None:
    decoder = load_model(model_folder("llama", head_dim=32), device=torch.device("cpu"), dtype=dtype)
    decoder._fused = None  # which keeps bfloat16
    prompt = random.Random(1).choices(range(VOCAB), k=120)
    whole, eighth = (PagedSequences(decoder, kv_dtype=kv) for kv in (None, FP8))
    assert eighth.kv.data.nbytes * decoder.dtype.itemsize == whole.kv.data.nbytes
    assert eighth.kv.page_bytes * decoder.dtype.itemsize == whole.kv.page_bytes
    for chunk in (prompt[:100], prompt[100:119], prompt[119:]):
        truth, found = (sequences.step({"a": chunk})["a"] for sequences in (whole, eighth))
        assert not torch.equal(found, truth)
        assert torch.corrcoef(torch.stack((found, truth)))[0, 1] > 0.98
    eighth.kv.copy_pages([(eighth.pages["a"][0], 0)])
    copied = eighth.kv.data.view(torch.uint8)
    assert torch.equal(copied[:, :, 0], copied[:, :, eighth.pages["a"][0]])


def test_bytes_per_page_is_what_a_page_takes() -> None:
    kv = cache(torch.bfloat16)
    config = read_config(model_folder("mistral"))
    assert (
        KVCache.bytes_per_page(config.kv_specs, LAYOUT.page_size, torch.bfloat16) * LAYOUT.num_pages
        == kv.data.nbytes
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells a process's memory there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_a_page_takes_memory_when_it_is_first_written(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

    before = resident()
    layout = replace(LAYOUT, num_pages=2**28 // (3 * 2 * 2 * 4 * 24 * dtype.itemsize))
    kv = KVCache(read_config(model_folder("mistral")).kv_specs, layout, dtype, torch.device("cpu"))
    assert resident() - before < 2**26 < kv.data.nbytes
    kv.data[:, :, : layout.num_pages // 2].fill_(1)
    full = resident()
    assert full - before > 2**26
    pieces = sum(1 for _ in kv.unmapping(range(layout.num_pages // 2)))
    assert pieces == 3 * 2, "neighbours go in one go, layer by layer, keys and values"
    assert full - resident() > 2**26


WIDE, NARROW = KVSpec(4, 8), KVSpec(1, 16, torch.bfloat16)
SPECS = (WIDE, NARROW, None, WIDE)


@pytest.mark.parametrize("granule", [0, 1024])
def test_layers_with_the_same_spec_are_a_group_and_a_page_has_a_place_in_each(granule: int) -> None:
    memory = Granules(granule, free=100) if granule else None
    kv = KVCache(SPECS, LAYOUT, torch.float32, torch.device("cpu"), memory=memory)
    assert {spec: tuple(group.shape) for spec, group in kv.groups.items()} == {
        WIDE: (2, 2, 6, 4, 4, 8),
        NARROW: (1, 2, 6, 1, 4, 16),
    }
    assert kv.page_bytes == (2 * 64 * 4 + 32 * 2) * 4
    assert [group.dtype for group in kv.groups.values()] == [torch.float32, torch.bfloat16]
    assert sorted(kv.layers) == [0, 1, 3]
    for index, (keys, values) in enumerate(kv.layers.values()):
        keys.fill_(index)
        values.fill_(10 + index)
    for index, (keys, values) in enumerate(kv.layers.values()):
        assert (keys == index).all()
        assert (values == 10 + index).all()
    for keys, values in kv.layers.values():
        keys[4], values[4] = -1, -2
    kv.copy_pages([(4, 1)])
    for keys, values in kv.layers.values():
        assert (keys[1] == -1).all()
        assert (values[1] == -2).all()
        assert not (keys[[0, 2, 3, 5]] < 0).any()


def test_in_granules_a_page_of_all_groups_is_one_stretch_of_memory() -> None:
    memory = Granules(1024, free=100)
    layout = replace(
        LAYOUT, num_pages=8, run=pages_of_a_run(KVCache.bytes_per_page(SPECS, 4, torch.float32), 1024)
    )
    kv = KVCache(SPECS, layout, torch.float32, torch.device("cpu"), memory=memory)
    assert layout.run == 4
    for keys, values in kv.layers.values():
        keys.fill_(1)
        values.fill_(1)
    for _ in kv.unmapping([4, 5, 6, 7]):
        pass
    for keys, values in kv.layers.values():
        assert keys[[4, 5, 6, 7]].isnan().all()
        assert values[[4, 5, 6, 7]].isnan().all()
        assert (keys[[0, 1, 2, 3]] == 1).all()


def test_a_model_whose_layers_keep_different_things_is_the_same_in_chunks_and_whole() -> None:
    config = read_config(model_folder("llama"))
    wide = config.layer_specs[0]
    assert isinstance(wide.attention, AttentionSpec)
    narrow = replace(wide, attention=replace(wide.attention, heads=8, kv_heads=1, head_dim=8, window=20))
    mixed = replace(config, layer_specs=(wide, narrow, wide))
    decoder = Decoder(mixed, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for _, tensor in decoder.tensors():
        assert isinstance(tensor, torch.Tensor)
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    decoder.pack()
    prompt = random.Random(1).choices(range(VOCAB), k=70)
    whole = PagedSequences(decoder, seed=1)
    assert len(whole.kv.groups) == 2
    truth = whole.step({"a": prompt})["a"]
    parts = PagedSequences(decoder, seed=2, page_size=8)
    parts.step({"b": prompt[5:30], "a": prompt[:41]})
    found = parts.step({"a": prompt[41:], "b": prompt[30:31]})["a"]
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention_ranks", [0, 2])
def test_the_cache_is_told_of_the_pages_of_each_step(
    attention_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[KVCache, list[int]] = {}
    monkeypatch.setattr(KVCache, "reach", lambda kv, page: told.setdefault(kv, []).append(page))
    base = model_folder("qwen3_moe", num_experts=8)
    options: dict[str, Any] = {}
    if attention_ranks:
        options = {"ranks": 2, "shared": True, "expert_groups": 2, "attention_ranks": 2}
    engine = EngineHarness(base, num_pages=64, page_size=16, **options)
    prompts = [[(7 * index + i) % VOCAB for i in range(100)] for index in range(2)]
    engine.play([engine.log(str(index), prompt, max_tokens=2) for index, prompt in enumerate(prompts)])
    assert [kv.num_pages for kv in told] == ([32, 32] if attention_ranks else [64])
    for kv, pages in told.items():
        used = [page for page in range(kv.num_pages) if not kv.data[:, :, page].isnan().all()]
        assert max(pages) == max(used), "no page is used before the cache is told of it"
