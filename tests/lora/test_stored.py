"""What lies in a pool's pages does not depend on whether an adapter came from memory or from its file."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.dora import DoraBias
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites
from personae.lora.stacking import stacked
from personae.lora.stored import KINDS, find, store
from personae.lora.throttle import Throttle

LAYERS = 3
SHAPES = LoraShapes(LAYERS, sites({"q": (48, 32), "v": (48, 16)}))


def adapter_of(seed: int, rank: int, modules: tuple[str, ...] = ("q", "v")) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        (layer, module): LoraPair(
            *(torch.randn(rank - layer, w, generator=generator) for w in SHAPES.modules[module]), 0.7
        )
        for layer in range(LAYERS)
        for module in modules
    }
    return make_adapter(f"{seed}", pairs, invocation=(5, seed))


def pool_of(dtype: torch.dtype = torch.float32) -> LoraPool:
    """One in whose pages something was before."""
    pool = LoraPool(SHAPES, capacity_rows=160, max_adapters=8, dtype=dtype, device=torch.device("cpu"))
    for stack in pool.stacks.values():
        stack.a.fill_(9)
        stack.b.fill_(9)
    return pool


def stored(adapter: Adapter, folder: Path, kind: str = "F32") -> Adapter:
    store(adapter, folder, SHAPES, kind)
    found = find(folder, adapter.digest, SHAPES, kind)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_adapter_from_its_file_is_bit_for_bit_what_it_is_from_memory(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    one, other = pool_of(dtype), pool_of(dtype)
    small, large = adapter_of(1, 5), adapter_of(2, 20)
    scattered = adapter_of(3, 92)  # in pages that the small ones left, and in more than one group
    for pool in (one, other):
        for adapter in (small, large):
            pool.load(adapter)
        pool.unload(small.digest)
    found = stored(scattered, tmp_path, KINDS[dtype])
    assert (found.digest, found.ranks, found.peak, found.invocation) == (
        scattered.digest, scattered.ranks, scattered.peak, scattered.invocation
    )  # fmt: skip
    one.load(scattered)
    other.load(found)
    other.check_integrity()
    for module, stack in one.stacks.items():
        assert torch.equal(stack.a, other.stacks[module].a)
        assert torch.equal(stack.b, other.stacks[module].b)


def test_the_file_is_a_safetensors_file_of_the_stacks(tmp_path: Path) -> None:
    adapter = adapter_of(1, 5)
    file = stored(adapter, tmp_path).stored
    assert file is not None
    tensors = load_file(file.path)
    for module, halves in stacked(adapter, LAYERS, torch.float32).stacks.items():
        for name, half in zip("ab", halves, strict=True):
            assert torch.equal(tensors.pop(f"{module}.{name}"), half)
    assert not tensors
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_a_file_that_has_changed_is_not_placed_and_not_kept(tmp_path: Path) -> None:
    adapter = adapter_of(1, 5)
    found = stored(adapter, tmp_path)
    assert found.stored is not None
    data = bytearray(found.stored.path.read_bytes())
    data[-1] ^= 1
    found.stored.path.write_bytes(data)
    pool = pool_of()
    with pytest.raises(AdapterError, match="has changed"):
        pool.load(found)
    pool.check_integrity()
    assert not pool.residents
    assert find(tmp_path, adapter.digest, SHAPES, "F32") is None
    pool.load(stored(adapter, tmp_path))


def test_a_file_that_has_gone_or_was_cut_while_its_adapter_waited_is_not_placed(tmp_path: Path) -> None:
    found = stored(adapter_of(1, 5), tmp_path)
    assert found.stored is not None
    found.stored.path.write_bytes(found.stored.path.read_bytes()[:-1])
    for reason in ("has changed", "No such file"):
        pool = pool_of()
        with pytest.raises(AdapterError, match=reason) as raised:
            pool.load(found)
        assert str(tmp_path) not in raised.value.message
        assert not pool.residents


def test_only_a_whole_file_of_this_adapter_for_this_base_and_dtype_is_found(tmp_path: Path) -> None:
    adapter = adapter_of(1, 5)
    assert find(tmp_path, adapter.digest, SHAPES, "F32") is None
    file = stored(adapter, tmp_path).stored
    assert file is not None
    assert find(tmp_path, adapter_of(2, 5).digest, SHAPES, "F32") is None
    assert find(tmp_path, adapter.digest, SHAPES, "BF16") is None
    for other in (
        LoraShapes(LAYERS + 1, SHAPES.sites),
        LoraShapes(LAYERS, sites({"q": (48, 33), "v": (48, 16)})),
        LoraShapes(LAYERS, sites({"q": (48, 32)})),
    ):
        assert find(tmp_path, adapter.digest, other, "F32") is None
    whole = file.path.read_bytes()
    for corrupted in (b"", whole[:-1], whole[:20], whole.replace(b"adapter", b"another")):
        file.path.write_bytes(corrupted)
        assert find(tmp_path, adapter.digest, SHAPES, "F32") is None


def test_a_header_with_any_byte_changed_is_not_found_and_never_an_error(tmp_path: Path) -> None:
    adapter = adapter_of(1, 5)
    file = stored(adapter, tmp_path).stored
    assert file is not None
    whole = file.path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = torch.Generator().manual_seed(0)
    for place in range(header):
        bit = 1 << int(torch.randint(8, (), generator=generator))
        file.path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        assert find(tmp_path, adapter.digest, SHAPES, "F32") is None, place
    for delivered in (
        b"1",
        b"null",
        b"[]",
        b"{}",
        b'{"adapter": 1}',
        b'{"adapter": "1"}',
        b'{"adapter": "{}"}',
    ):
        begin, end = whole.index(b'{"adapter"'), whole.index(b"}", whole.index(b'"checksum"')) + 1
        text = (whole[8:begin] + delivered + whole[end:header]).strip()
        file.path.write_bytes(len(text).to_bytes(8, "little") + text + whole[header:])
        assert find(tmp_path, adapter.digest, SHAPES, "F32") is None, delivered


def test_what_a_file_of_stacks_cannot_say_has_none(tmp_path: Path) -> None:
    dora = make_adapter(
        "dora", adapter_of(1, 5).pairs, dora_bias={(0, "q"): DoraBias(magnitude=torch.ones(32))}
    )
    store(dora, tmp_path, SHAPES, "F32")
    assert not list(tmp_path.iterdir())


def test_without_room_on_the_disk_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    store(adapter_of(1, 5), tmp_path, SHAPES, "F32")
    assert not list(tmp_path.iterdir())


def test_a_rest_may_be_taken_before_every_slice_that_is_summed_up_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int | str] = []
    read = os.preadv

    def reading(file: int, parts: Sequence[memoryview], offset: int) -> int:
        done.append(sum(part.nbytes for part in parts))
        return read(file, parts, offset)

    monkeypatch.setattr("personae.lora.stored._SLICE", 4096)
    adapter = adapter_of(3, 92)
    store(adapter, tmp_path, SHAPES, "F32", lambda: done.append("rest"))
    size = sum(a.nbytes + b.nbytes for a, b in stacked(adapter, LAYERS, torch.float32).stacks.values())
    assert len(done) >= 2 * size / 4096

    done.clear()
    monkeypatch.setattr("os.preadv", reading)
    monkeypatch.setattr(Throttle, "rest", lambda _: done.append("rest"))
    found = find(tmp_path, adapter.digest, SHAPES, "F32")
    assert found is not None
    pool_of().load(found)
    part = 64 * 48 * 4  # of one layer, neighbouring ranks are read at once
    assert done[::2] == ["rest"] * (len(done) // 2)
    slices = [each for each in done[1::2] if isinstance(each, int)]
    assert sum(slices) == size
    assert max(slices) < 4096 + part
