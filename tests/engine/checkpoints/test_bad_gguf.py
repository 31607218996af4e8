"""GGUF files that are not what they should be: each gets a sentence that says what is wrong."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from tiny_models import model_folder

from personae.engine.checkpoints.gguf.tensors import SERVED
from personae.engine.loader import load_model
from personae.engine.tokens import Tokenizer
from personae.errors import ModelLoadError
from personae.evals.gguf_fuzz import play

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "a.gguf", model_folder("llama"), Type.Q8_0)


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, device=CPU)
    return caught.value.message


def written(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], object], family: str = "llama", **options: Any
) -> Path:
    return write_gguf(tmp_path / "b.gguf", model_folder(family), change=change, **options)


def without(writer: gguf.GGUFWriter, *keys: str) -> None:
    for key in keys:
        del writer.kv_data[0][key]


def test_damaged_files_load_or_are_refused_by_a_sentence(tmp_path: Path) -> None:
    found = play(1, 300, tmp_path)
    assert found["loaded"] > 20
    assert found["refused"] > 100


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.999])
def test_a_truncated_file(share: float, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert ("is the download complete?" if share else "is not a GGUF file") in refused(file)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    other = tmp_path / "a.gguf"
    other.write_bytes(b"PK\3\4 and more")
    assert refused(other) == "a.gguf is not a GGUF file: it does not begin with 'GGUF'"


@pytest.mark.parametrize(
    ("version", "why"), [(1, "is GGUF version 1; versions 2 and 3 are supported"), (3 << 24, "is big-endian")]
)
def test_a_version_that_is_not_served(version: int, why: str, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", version)
    file.write_bytes(data)
    assert why in refused(file)


@pytest.mark.parametrize("number", [2**24, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", [8, 16])
def test_counts_for_which_the_file_is_too_small(place: int, number: int, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + 8] = struct.pack("<Q", number)
    file.write_bytes(data)
    assert f"is too small for the {number} " in refused(file)


@pytest.mark.parametrize(
    "kind", [gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT8, gguf.GGUFValueType.FLOAT64]
)
def test_an_array_that_is_longer_than_the_file(kind: gguf.GGUFValueType, file: Path) -> None:
    data, key = bytearray(file.read_bytes()), b"tokenizer.ggml.tokens"
    place = data.index(key) + len(key) + 4
    data[place : place + 12] = struct.pack("<IQ", kind, 2**60)
    file.write_bytes(data)
    assert "tokenizer.ggml.tokens" in refused(file)


def test_tensors_that_share_their_bytes(file: Path) -> None:
    """So that a small file can ask for much memory."""
    data, key = bytearray(file.read_bytes()), b"blk.1.attn_q.weight"
    place = data.index(key) + len(key) + 4 + 16 + 4
    data[place : place + 8] = struct.pack("<Q", 0)
    file.write_bytes(data)
    assert "blk.1.attn_q.weight begins at 0, but the tensors before it end at" in refused(file)


@pytest.mark.parametrize("type", [Type.Q8_1, Type.Q8_K, Type.I8])
def test_types_that_are_not_served_are_named(type: Type, tmp_path: Path) -> None:
    assert type not in SERVED
    elements, size = gguf.GGML_QUANT_SIZES[type]
    folder = model_folder("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    file = write_gguf(tmp_path / "a.gguf", folder, types=lambda _: Type.F16)
    # The same file with a tensor of the other type at the end.
    writer = gguf.GGUFWriter(file, "llama")
    reader = gguf.GGUFReader(file)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        raw, kind = tensor.data, tensor.tensor_type
        if tensor.name == "blk.0.ffn_down.weight":
            raw, kind = np.zeros((256, 256 // elements * size), np.uint8), type
        writer.add_tensor(tensor.name, np.array(raw), raw_dtype=kind)
    writer.path = tmp_path / "b.gguf"
    writer.write_header_to_file(tmp_path / "b.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    why = refused(tmp_path / "b.gguf")
    assert f"of an unsupported dtype: model.layers.0.mlp.down_proj.weight ({type.name})" in why


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    file = written(
        tmp_path, lambda writer: writer.kv_data[0]["general.architecture"].__setattr__("value", "mamba")
    )
    assert refused(file).startswith(
        'b.gguf: general.architecture: "mamba" is not supported; supported are: llama, qwen2'
    )


@pytest.mark.parametrize(
    ("type", "why"),
    [
        ("imatrix", "an importance matrix (imatrix)"),
        ("adapter", "a LoRA adapter"),
        ("mmproj", "reads images"),
    ],
)
def test_files_that_are_no_models_are_named(type: str, why: str, tmp_path: Path) -> None:
    assert why in refused(written(tmp_path, lambda writer: writer.add_type(type)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: without(w, "llama.block_count"), "llama.block_count: is missing"),
        (lambda w: w.add_expert_count(8), "llama.expert_used_count: is missing"),
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale: is supported in Granite only"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "which longrope needs"),
        (lambda w: w.add_value_length(24), "llama.attention.value_length: differs from"),
        (lambda w: w.add_uint32("general.alignment", 24), "general.alignment 24"),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((4, 4), np.float32)),
            "unexpected: blk.0.f",
        ),
        (
            lambda w: w.add_tensor("blk.9.attn_q.weight", np.zeros((4, 4), np.float32)),
            "unexpected: blk.9.attn_q.weight",
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(8, np.float32)), "not numbers over 0"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(9, np.float32)), "has 9 factors for 8 pairs"),
    ],
)
def test_a_model_that_is_not_understood(
    change: Callable[[gguf.GGUFWriter], object], why: str, tmp_path: Path
) -> None:
    assert why in refused(written(tmp_path, change))


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        for name, raw in tensors.items():
            if name == "blk.1.ffn_up.weight":
                raw[3, :2] = 0xFF, 0x7F  # the scale of a block
        return tensors

    file = write_gguf(tmp_path / "a.gguf", model_folder("llama"), Type.Q8_0, tensors=spoil)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(ModelLoadError, match="has values that are not finite"):
            load_model(file, device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: without(w, "tokenizer.ggml.model"), "tokenizer.ggml.model: is missing"),
        (
            lambda w: w.kv_data[0]["tokenizer.ggml.model"].__setattr__("value", "bert"),
            '"bert" is not supported',
        ),
        (
            lambda w: w.kv_data[0]["tokenizer.ggml.pre"].__setattr__("value", "new-one"),
            '"new-one" is not supported',
        ),
        (lambda w: w.kv_data[0]["tokenizer.ggml.merges"].value.append("one"), '"one" is not two tokens'),
        (lambda w: w.kv_data[0]["tokenizer.ggml.merges"].value.append("@@@ ~~~"), "merges: cannot be used"),
        (
            lambda w: w.add_eot_token_id(100_000),
            "eot_token_id: 100000 is outside the vocabulary of 509 tokens",
        ),
        (lambda w: w.kv_data[0]["tokenizer.ggml.token_type"].value.pop(), "has 508 entries for 509 tokens"),
        (lambda w: w.kv_data[0]["tokenizer.ggml.model"].__setattr__("value", "llama"), "scores: is missing"),
    ],
)
def test_a_tokenizer_that_is_not_understood(
    change: Callable[[gguf.GGUFWriter], object], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.load(written(tmp_path, change))
    assert why in caught.value.message
