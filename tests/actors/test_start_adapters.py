"""The adapters that a server starts with are kept as they lie in the pool, for its next start."""

import os
from pathlib import Path

import pytest
import torch
from tiny_adapters import lora_shapes, make_adapter_folder, tiny_config

from personae.actors.start_adapters import KeptAdapters, read_start_adapters
from personae.errors import AdapterError
from personae.lora.adapter import Adapter
from personae.lora.fit import bounds_of_pool
from personae.lora.library import AdapterLibrary
from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes

BASE = tiny_config()
SHAPES = lora_shapes(BASE)
BOUNDS = bounds_of_pool(SHAPES, 160, torch.float32)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_adapter_folder(tmp_path / "tenants" / "one", BASE, rank=4, targets=("q_proj", "v_proj"))


def start(kept: Path, source: Path, shapes: LoraShapes = SHAPES, kind: str = "F32") -> Adapter:
    """The adapter as a start gets it, which keeps it for the next one."""
    adapters = KeptAdapters(kept, shapes, kind)
    found = read_start_adapters({"named": source}, shapes, adapters)["named"]
    adapters.write(BOUNDS)
    return found


def pool_with(adapter: Adapter) -> LoraPool:
    pool = LoraPool(SHAPES, capacity_rows=64, max_adapters=2, dtype=torch.float32, device=torch.device("cpu"))
    pool.load(adapter)
    return pool


def test_the_next_start_takes_what_the_first_one_kept_and_it_is_the_same_adapter(
    tmp_path: Path, source: Path
) -> None:
    first, second = start(tmp_path / "kept", source), start(tmp_path / "kept", source)
    assert first.stored is None
    assert second.stored is not None
    for name in ("name", "digest", "ranks", "peak", "invocation"):
        assert getattr(first, name) == getattr(second, name)
    assert (first.rank, first.traits()) == (second.rank, second.traits())
    one, other = pool_with(first), pool_with(second)
    for module, stack in one.stacks.items():
        assert torch.equal(stack.a, other.stacks[module].a)
        assert torch.equal(stack.b, other.stacks[module].b)


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSORS_FILE])
def test_an_adapter_whose_files_have_changed_is_read_again(tmp_path: Path, source: Path, file: str) -> None:
    start(tmp_path / "kept", source)
    make_adapter_folder(tmp_path / "other", BASE, rank=4, targets=("q_proj", "v_proj"), seed=5)
    (source / file).write_bytes((tmp_path / "other" / file).read_bytes())
    os.utime(source / file, (1, 1))
    again = start(tmp_path / "kept", source)
    assert again.stored is None
    assert again.digest == read_adapter(source, SHAPES).digest


def test_a_broken_adapter_is_refused_at_each_start(tmp_path: Path, source: Path) -> None:
    start(tmp_path / "kept", source)
    (source / CONFIG_FILE).write_text("{}")
    for _ in range(2):
        with pytest.raises(AdapterError, match=f"adapter {source}: .*peft_type"):
            start(tmp_path / "kept", source)


def test_another_dtype_or_another_base_reads_it_again(tmp_path: Path, source: Path) -> None:
    start(tmp_path / "kept", source)
    assert start(tmp_path / "kept", source, kind="BF16").stored is None
    wider = lora_shapes(tiny_config(num_hidden_layers=BASE.num_hidden_layers + 1))
    assert start(tmp_path / "kept", source, wider).stored is None
    assert start(tmp_path / "kept", source).stored is not None


def test_the_least_recently_used_goes_when_the_bound_is_reached(tmp_path: Path) -> None:
    sources = [
        make_adapter_folder(tmp_path / f"tenant-{seed}", BASE, rank=4, targets=("q_proj",), seed=seed)
        for seed in range(3)
    ]
    kept, size = tmp_path / "kept", 0
    for at, source in enumerate(sources):
        adapters = KeptAdapters(kept, SHAPES, "F32", bound=size * 5 // 2 or 2**20)
        adapters.read(source)
        adapters.write(BOUNDS)
        size = size or sum(file.stat().st_size for file in kept.rglob("*.safetensors"))
        for place in kept.iterdir():
            if place.stat().st_mtime > 1000:
                os.utime(place, (at + 1, at + 1))
    assert len(list(kept.iterdir())) == 2
    assert [start(kept, source).stored is None for source in sources[1:]] == [False, False]
    assert start(kept, sources[0]).stored is None


def test_what_does_not_fit_the_pool_is_not_kept(tmp_path: Path, source: Path) -> None:
    narrow = bounds_of_pool(SHAPES, 2, torch.float32)
    adapters = KeptAdapters(tmp_path / "kept", SHAPES, "F32")
    adapters.read(source)
    adapters.write(narrow)
    assert not (tmp_path / "kept").exists()


def test_a_kept_file_that_is_damaged_or_gone_is_made_of_the_adapter_again(
    tmp_path: Path, source: Path
) -> None:
    digest = start(tmp_path / "kept", source).digest
    adapters = KeptAdapters(tmp_path / "kept", SHAPES, "F32")
    adapters.read(source)
    library = AdapterLibrary(SHAPES, {digest: source}, None, 2**20, stored="F32", kept=adapters.folders)
    found = library.take(digest, library.read(digest))
    assert found.stored is not None
    data = bytearray(found.stored.path.read_bytes())
    data[-1] ^= 1
    found.stored.path.write_bytes(data)
    with pytest.raises(AdapterError, match="has changed"):
        pool_with(found)
    read = library.take(digest, library.read(digest))
    assert read.stored is None
    assert read.digest == digest


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_next_start(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    start(tmp_path / "file" / "kept", source)
    assert "is not kept in" in caplog.text
    assert start(tmp_path / "file" / "kept", source).stored is None


def test_what_a_killed_process_left_unfinished_is_deleted_when_it_is_old(
    tmp_path: Path, source: Path
) -> None:
    old, new = tmp_path / "kept" / ".writing-old", tmp_path / "kept" / ".writing-new"
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "part").write_bytes(b"x")
    os.utime(old, (0, 0))
    start(tmp_path / "kept", source)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"
