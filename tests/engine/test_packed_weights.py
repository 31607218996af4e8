"""Packed weights that an earlier start kept: the next one maps them, and uses no file that is not whole."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedSequences
from tiny_models import VOCAB, model_folder

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine import loader, packed_weights
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.packed_weights import PackedWeights
from personae.kernels.cpu import operators
from personae.kernels.mappable import MappableMemory

pytestmark = pytest.mark.skipif(
    "fuse" not in operators(), reason="no compiler, or no decoder for this machine"
)
CPU = torch.device("cpu")
BOUND = 2**30
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama, tied": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"hidden_size": 96}),
}


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """The decoders that were filled from the model's files."""
    found: list[Decoder] = []
    fill = loader._fill

    def noted(decoder: Decoder, *more: Any) -> None:
        found.append(decoder)
        fill(decoder, *more)

    monkeypatch.setattr(loader, "_fill", noted)
    return found


def folder_of(name: str) -> Path:
    family, changes = MODELS[name]
    return model_folder(family, torch_dtype="bfloat16", **changes)


def loaded(model: Path, store: Path, *, bound: int = BOUND, shared: bool = False, **options: Any) -> Decoder:
    """The model as a start loads it, once its packed weights are kept."""
    packed = PackedWeights(store, bound, shared=shared)
    decoder = load_model(model, device=CPU, packed=packed, **options)
    packed.written()
    return decoder


def logits(decoder: Decoder) -> torch.Tensor:
    hidden, _ = PagedSequences(decoder).forward({"a": [5 * i % VOCAB for i in range(40)]})
    return decoder.logits(hidden).clone()


def only_file(store: Path) -> Path:
    (path,) = store.iterdir()
    return path


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_second_start_reads_no_weights_and_computes_the_same_bits(
    name: str, quantize: str | None, tmp_path: Path, fills: list[Decoder]
) -> None:
    model = folder_of(name)
    truth = load_model(model, device=CPU, quantize=quantize)
    first = loaded(model, tmp_path, quantize=quantize)
    assert len(fills) == 2
    second = loaded(model, tmp_path, quantize=quantize)
    assert len(fills) == 2
    for decoder in (first, second):
        assert torch.equal(logits(decoder), logits(truth))
        assert torch.equal(decoder.embedding.plain(), truth.embedding.plain())
        assert decoder.fingerprints == truth.fingerprints
        assert decoder.quantization == truth.quantization
        assert decoder.weight_bytes == truth.weight_bytes
        for mine, theirs in zip(decoder._linears(), truth._linears(), strict=True):
            assert torch.equal(mine.plain(), theirs.plain())


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def header_changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def of_an_older_format(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-48:-40] = b"personaO"
    path.write_bytes(data)


def without_its_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage", [truncated, empty, grown, header_changed, of_an_older_format, without_its_end]
)
def test_a_file_that_is_not_whole_is_packed_again(
    damage: Callable[[Path], None],
    tmp_path: Path,
    fills: list[Decoder],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = folder_of("llama")
    truth = logits(loaded(model, tmp_path))
    damage(only_file(tmp_path))
    assert torch.equal(logits(loaded(model, tmp_path)), truth)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{only_file(tmp_path)} is damaged; the weights are packed again"
    ]
    loaded(model, tmp_path)
    assert len(fills) == 2


def test_another_model_s_file_of_that_name_is_not_used(tmp_path: Path, fills: list[Decoder]) -> None:
    loaded(folder_of("llama"), tmp_path / "one")
    loaded(folder_of("llama, tied"), tmp_path / "two")
    mine, other = only_file(tmp_path / "one"), only_file(tmp_path / "two")
    mine.write_bytes(other.read_bytes())
    assert torch.equal(
        logits(loaded(folder_of("llama"), tmp_path / "one")),
        logits(load_model(folder_of("llama"), device=CPU)),
    )
    assert len(fills) == 4


def test_a_changed_model_or_option_or_code_has_a_file_of_its_own(
    tmp_path: Path, fills: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    shutil.copytree(folder_of("llama"), model)
    loaded(model, store)
    loaded(model, store, quantize="int8")
    weights = model / "model.safetensors"
    data, found = bytearray(weights.read_bytes()), weights.stat()
    data[-2:] = b"\0\0"  # the last number of the last tensor
    weights.write_bytes(data)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))  # as cp --preserve and rsync leave it
    changed = loaded(model, store)
    assert torch.equal(logits(changed), logits(load_model(model, device=CPU)))
    monkeypatch.setattr(loader, "code_digest", lambda: "another version")
    loaded(model, store)
    assert len(fills) == 5
    assert len(list(store.iterdir())) == 4


def in_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"")


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*call: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_weights.os, "write", no_room)


def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(packed_weights.os, "fsync", fails)


def without_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_free(*call: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_weights, "check_free", none_free)


@pytest.mark.parametrize("fault", [in_the_way, full, broken, without_room])
def test_where_nothing_can_be_kept_one_sentence_says_so_and_the_model_is_served(
    fault: Callable[[Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = tmp_path / "store"
    fault(store, monkeypatch)
    decoder = loaded(folder_of("llama"), store)
    assert torch.equal(logits(decoder), logits(load_model(folder_of("llama"), device=CPU)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(store) in warning
    assert not store.is_dir() or not list(store.iterdir())


def test_the_least_recently_used_weights_make_room(tmp_path: Path) -> None:
    models = [folder_of(name) for name in ("llama", "llama, biases", "qwen3")]
    loaded(models[0], tmp_path)
    first = only_file(tmp_path)
    loaded(models[1], tmp_path)
    second = next(path for path in tmp_path.iterdir() if path != first)
    for number, path in enumerate((second, first)):  # the first was used last
        os.utime(path, (1000 + number, 1000 + number))
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    loaded(models[2], tmp_path, bound=sizes + 2**20)
    assert first.exists()
    assert not second.exists()
    assert len(list(tmp_path.iterdir())) == 2
    os.utime(first, (1000, 1000))
    loaded(models[0], tmp_path)
    assert first.stat().st_mtime > 1000


def test_weights_that_are_larger_than_the_bound_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded(folder_of("llama"), tmp_path / "store", bound=1000)
    assert not (tmp_path / "store").exists()
    assert any("--packed-weights-size" in record.getMessage() for record in caplog.records)


def test_what_a_killed_process_left_unfinished_goes(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{packed_weights._UNFINISHED}{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    hours = time.time() - 7200
    os.utime(old, (hours, hours))
    loaded(folder_of("llama"), tmp_path)
    assert not old.exists()
    assert new.exists()  # another engine may be writing it


def mapped_files(memory: torch.Tensor) -> Iterator[str]:
    """The files that lie behind a tensor in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= memory.data_ptr() < last and "/" in line:
            yield line[line.index("/") :]


def test_engines_that_share_weights_map_one_file(tmp_path: Path) -> None:
    model = folder_of("llama")
    first, second = (loaded(model, tmp_path, shared=True) for _ in range(2))
    for decoder in (first, second):
        assert list(mapped_files(decoder.embedding.plain())) == [str(only_file(tmp_path))]
        assert torch.equal(logits(decoder), logits(load_model(model, device=CPU)))


def test_an_engine_that_comes_second_maps_the_file_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_of("llama")
    loaded(model, tmp_path, shared=True)
    found = only_file(tmp_path).stat().st_ino
    monkeypatch.setattr(PackedWeights, "find", lambda *call: None)  # both packed at the same time
    decoder = loaded(model, tmp_path, shared=True)
    assert only_file(tmp_path).stat().st_ino == found
    assert list(mapped_files(decoder.embedding.plain())) == [str(only_file(tmp_path))]


@pytest.mark.parametrize("shared", [False, True])
def test_only_weights_that_are_not_shared_are_copied_to_huge_pages(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappableMemory, "_on_huge_pages", lambda memory: False)
    data = torch.arange(5 * 2**20, dtype=torch.int32).view(torch.uint8)
    (tmp_path / "file").write_bytes(data.numpy().tobytes() + bytes(2**21))
    memory = MappableMemory(data.nbytes)
    with (tmp_path / "file").open("rb") as file:
        memory.map(file.fileno())
    assert list(mapped_files(memory.bytes)) == [str(tmp_path / "file")]
    memory.settle(shared=shared)
    assert list(mapped_files(memory.bytes)) == [str(tmp_path / "file")] * shared
    assert torch.equal(memory.bytes, data)


@pytest.mark.parametrize("found", [False, True])
def test_a_process_that_waits_has_no_copy_of_its_own_before_it_computes(
    found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappableMemory, "_on_huge_pages", lambda memory: False)
    settled = threading.Event()
    settle = MappableMemory.settle

    def noted(memory: MappableMemory, *, shared: bool) -> None:
        settle(memory, shared=shared)
        settled.set()

    model = folder_of("llama")
    if found:
        loaded(model, tmp_path)
    monkeypatch.setattr(MappableMemory, "settle", noted)
    packed = PackedWeights(tmp_path, BOUND, waits=True)
    decoder = load_model(model, device=CPU, packed=packed)
    packed.written()
    assert not settled.wait(0.2)
    assert list(mapped_files(decoder.embedding.plain())) == [str(only_file(tmp_path))]
    packed.settle()
    assert settled.wait(60)
    assert not list(mapped_files(decoder.embedding.plain()))
    assert torch.equal(logits(decoder), logits(load_model(model, device=CPU)))


def test_weights_that_were_kept_cannot_be_overwritten(tmp_path: Path) -> None:
    loaded(folder_of("llama"), tmp_path)
    code = f"""
import torch
from pathlib import Path
from personae.engine import packed_weights
from personae.engine.loader import load_model
packed_weights.LEAST_BYTES = 0
store = packed_weights.PackedWeights(Path({str(tmp_path)!r}), {BOUND}, shared=True)
model = Path({str(folder_of("llama"))!r})
decoder = load_model(model, device=torch.device("cpu"), packed=store)
print("loaded", flush=True)
decoder.embedding.plain().fill_(0)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "loaded\n"
    assert found.returncode < 0  # by a signal


@pytest.mark.parametrize(("size", "kept"), [(None, 1), (2**30, 1), (0, 0)])
def test_the_option_s_size_says_whether_anything_is_kept(
    size: int | None, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finished: list[PackedWeights] = []
    monkeypatch.setattr(PackedWeights, "_keep", _then(PackedWeights._keep, finished))
    assemble(EngineOptions(folder_of("llama"), device="cpu", kv_memory=2**22, packed_weights_size=size))
    for store in finished:
        store.written()
    assert len(list((tmp_path / "personae" / "weights").glob("*"))) == kept


def _then(keep: Callable[..., None], finished: list[PackedWeights]) -> Callable[..., None]:
    def noted(store: PackedWeights, *call: Any) -> None:
        finished.append(store)
        keep(store, *call)

    return noted
