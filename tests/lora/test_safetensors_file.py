"""A safetensors file is believed only where it agrees with itself: a lie is an AdapterError, never a
crash."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tiny_adapters import lora_shapes, make_adapter_folder, tiny_config

from personae.errors import AdapterError
from personae.lora.peft import read_adapter
from personae.lora.peft_names import TENSORS_FILE
from personae.lora.safetensors_file import MAX_HEADER, MAX_NAME, SafetensorsFile

BASE = tiny_config()
SHAPES = lora_shapes(BASE)
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "c": torch.tensor([[0.25]], dtype=torch.float16),
}


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(TENSORS, {"format": "pt"}))
    with SafetensorsFile(path) as file:
        assert file.entries.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            found = file.read(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


LIES: dict[str, tuple[Any, bytes, str]] = {
    "gap before the first": ({"a": entry(4, 8)}, bytes(8), "begins at byte 4"),
    "gap between": ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "begins at byte 8"),
    "overlap": ({"a": entry(0, 8, (2,)), "b": entry(4, 8)}, bytes(8), "begins at byte 4"),
    "the same bytes twice": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), "begins at byte 0"),
    "past the end": ({"a": entry(0, 40, (10,))}, bytes(8), "describes 40 bytes"),
    "bytes left over": ({"a": entry(0, 4)}, bytes(8), "describes 4 bytes"),
    "end before begin": ({"a": entry(4, 0, (0,))}, b"", "data_offsets are"),
    "size unlike the shape": ({"a": entry(0, 8)}, bytes(8), "which is 4 bytes"),
    "a huge shape": ({"a": entry(0, 4, (2**40, 2**40))}, bytes(4), "bytes"),
    "a shape past 64 bits": ({"a": entry(0, 4, (10**30,))}, bytes(4), "has shape"),
    "a negative shape": ({"a": entry(0, 4, (-1, -1))}, bytes(4), "has shape"),
    "a shape of truths": ({"a": entry(0, 4, (True,))}, bytes(4), "has shape"),
    "a shape of fractions": ({"a": entry(0, 4, (1.0,))}, bytes(4), "has shape"),
    "too many dimensions": ({"a": entry(0, 4, (1,) * 100)}, bytes(4), "has shape"),
    "three offsets": ({"a": entry(0, 4) | {"data_offsets": [0, 4, 4]}}, bytes(4), "has shape"),
    "offsets of text": ({"a": entry(0, 4) | {"data_offsets": "04"}}, bytes(4), "has shape"),
    "an unknown dtype": ({"a": entry(0, 4, dtype="I32")}, bytes(4), 'dtype "I32"'),
    "a dtype that is a list": ({"a": entry(0, 4, dtype=["F32"])}, bytes(4), "dtype"),
    "a field more": ({"a": entry(0, 4) | {"extra": 1}}, bytes(4), "must be described"),
    "a field less": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "must be described"),
    "no description": ({"a": 3}, bytes(4), "must be described"),
    "a name twice": (b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":{}}', bytes(4), "twice"),
    "a name without end": ({"n" * (MAX_NAME + 1): entry(0, 4)}, bytes(4), "name has 257"),
    "a list": ([], b"", "not a JSON object"),
    "no JSON": (b"{]", b"", "not JSON"),
    "no UTF-8": (b'{"\xff":1}', b"", "not JSON"),
    "nested without end": (b"[" * 100_000, b"", "not JSON"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(lie: str, tmp_path: Path) -> None:
    header, data, reason = LIES[lie]
    with pytest.raises(AdapterError, match=reason) as refused:
        SafetensorsFile(write(tmp_path / "x.safetensors", header, data))
    assert len(refused.value.message) < 1000
    assert refused.value.param, "the tensor, or the file"


@pytest.mark.parametrize("length", [0, 1, 500, MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"header of {length} bytes") as refused:
        SafetensorsFile(write(tmp_path / "x.safetensors", {"a": entry(0, 4)}, b"", length))
    assert refused.value.param == "x.safetensors"


def test_a_name_that_is_no_text_is_refused_in_text_that_can_be_sent(tmp_path: Path) -> None:
    header = b'{"\\ud800": {"dtype": "X", "shape": [], "data_offsets": []}}'
    with pytest.raises(AdapterError) as refused:
        SafetensorsFile(write(tmp_path / "x.safetensors", header, b""))
    refused.value.message.encode()


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": torch.zeros(100_000)}))
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(AdapterError, match="cut short"):
            file.read("a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter_folder(tmp_path_factory.mktemp("fuzz") / "it", BASE, rank=2, targets=("q_proj",))


@pytest.fixture(scope="module")
def original(folder: Path) -> bytes:
    return (folder / TENSORS_FILE).read_bytes()


MUTATIONS: list[Callable[[bytes, int, int], bytes]] = [
    lambda data, at, byte: data[:at],
    lambda data, at, byte: data[:at] + bytes([byte]) + data[at + 1 :],
    lambda data, at, byte: data[:at] + bytes([byte]) + data[at:],
    lambda data, at, byte: data[:at] + data[at + 1 :],
    lambda data, at, byte: data + bytes([byte]) * (at % 50 + 1),
    lambda data, at, byte: struct.pack("<Q", at) + data[8:],
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
@given(st.sampled_from(MUTATIONS), st.integers(0, 1500), st.integers(0, 255))
def test_a_mutated_adapter_is_refused_or_has_the_same_names_and_shapes(
    folder: Path, original: bytes, mutate: Callable[[bytes, int, int], bytes], at: int, byte: int
) -> None:
    (folder / TENSORS_FILE).write_bytes(mutate(original, at % len(original), byte))
    try:
        adapter = read_adapter(folder, SHAPES)
    except AdapterError:
        pass
    else:  # a byte of the data or of white space: nothing that the format could tell
        assert adapter.ranks == {"q": 2}
        assert all(pair.a.isfinite().all() and pair.b.isfinite().all() for pair in adapter.pairs.values())
        assert len(adapter.pairs) == 2
