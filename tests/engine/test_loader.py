import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_models import make_family_folder
from paged import PagedSequences
from programs import Program
from safetensors.torch import load_file
from tiny_models import make_model_folder, model_folder, write_json, write_weights

from personae.engine import loader
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import QUANTIZATIONS
from personae.errors import ModelLoadError

CPU = torch.device("cpu")
PEAK_OF_LOADING = Path(__file__).resolve().parents[1] / "support" / "peak_of_loading.py"
Weights = dict[str, torch.Tensor]


def load(folder: Path, dtype: str = "auto") -> Decoder:
    return load_model(folder, device=CPU, dtype=dtype)


def logits(decoder: Decoder) -> torch.Tensor:
    return PagedSequences(decoder).step({"a": [1, 2, 3]})["a"]


def changed(
    path: Path, change: Callable[[Weights], object], family: str = "llama", **overrides: object
) -> Path:
    """A folder whose weights went through `change`."""
    make_model_folder(path, family, **overrides)
    weights = load_file(path / "model.safetensors")
    change(weights)
    write_weights(path, weights)
    return path


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_every_tensor_of_the_file_lands_in_its_place(family: str, biases: dict[str, bool]) -> None:
    folder = model_folder(family, **biases)
    stored = load_file(folder / "model.safetensors")
    filled = dict(load(folder).tensors())
    assert filled.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(filled[name], tensor), name


def test_shards_load_as_a_single_file_does(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "qwen3", shards=3)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(load(tmp_path)), logits(load(model_folder("qwen3"))))


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("bfloat16", "float16", torch.float16),
    ],
)
def test_weights_are_converted_to_the_dtype_asked_for(
    stored: str, asked: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda device: True)
    decoder = load(model_folder("llama", torch_dtype=stored), asked)
    assert decoder.dtype == expected
    assert decoder.embedding.plain().dtype == expected
    assert decoder.norm.weight.dtype == torch.float32  # of norms, always
    assert logits(decoder).isfinite().all()


@pytest.mark.parametrize(
    ("asked", "memory", "expected"),
    [
        ("auto", None, torch.float32),
        ("auto", 2**40, torch.float32),
        ("auto", 2**10, torch.bfloat16),
        ("bfloat16", 2**40, torch.bfloat16),
    ],
)
def test_auto_is_float32_where_the_processor_cannot_multiply_bfloat16_and_half_of_the_memory_suffices(
    asked: str, memory: int | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda device: False)
    monkeypatch.setattr(loader, "main_memory", lambda: memory)
    assert load(model_folder("llama", torch_dtype="bfloat16"), asked).dtype == expected
    assert load(model_folder("llama", torch_dtype="float16"), asked).dtype == expected


def test_auto_without_a_dtype_in_the_config_is_that_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda device: True)
    make_model_folder(tmp_path, torch_dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["torch_dtype"]
    write_json(tmp_path / "config.json", config)
    assert load(tmp_path).dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r'^dtype: "int8"'):
        load(model_folder("llama"), "int8")
    make_model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "torch_dtype": "float64"})
    with pytest.raises(ModelLoadError, match=r'^config\.json: dtype: "float64"'):
        load(tmp_path)


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    gone = ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"]
    with pytest.raises(ModelLoadError, match="missing") as caught:
        load(changed(tmp_path, lambda weights: [weights.pop(name) for name in gone]))
    assert all(name in caught.value.message for name in gone)
    assert "unexpected" not in caught.value.message


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    extra = {
        "model.layers.3.mlp.up_proj.weight": torch.ones(1),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(16),
    }
    with pytest.raises(ModelLoadError, match="unexpected") as caught:
        load(changed(tmp_path, lambda weights: weights.update(extra)))
    assert all(name in caught.value.message for name in extra)


def test_mis_shaped_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    bad = {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}
    message = "mis-shaped: model.layers.0.self_attn.k_proj.weight (expected [32, 64], found [64, 64])"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load(changed(tmp_path, lambda weights: weights.update(bad)))


def test_tensors_of_a_foreign_dtype_are_named(tmp_path: Path) -> None:
    bad = {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    with pytest.raises(ModelLoadError, match=re.escape("model.norm.weight (I8)")):
        load(changed(tmp_path, lambda weights: weights.update(bad)))


def test_a_long_list_of_names_is_cut_and_counted(tmp_path: Path) -> None:
    extra = {f"extra.{index}": torch.ones(1) for index in range(1000)}
    with pytest.raises(ModelLoadError, match="and 960 more") as caught:
        load(changed(tmp_path, lambda weights: weights.update(extra)))
    assert len(caught.value.message) < 2000


def test_the_rotary_buffer_of_old_checkpoints_is_harmless(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert load(changed(tmp_path, lambda weights: weights.update(extra))).config.layers == 3


def test_a_tied_model_may_bring_its_output_matrix_or_not(tmp_path: Path) -> None:
    def repeat(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    folder = changed(tmp_path, repeat, tie_word_embeddings=True)
    assert torch.equal(logits(load(folder)), logits(load(model_folder("llama", tie_word_embeddings=True))))


def test_a_tied_model_whose_output_matrix_differs_is_refused(tmp_path: Path) -> None:
    def differ(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs"):
        load(changed(tmp_path, differ, tie_word_embeddings=True))


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda weights: weights["model.layers.1.mlp.up_proj.weight"].fill_(1e6))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight has values that do not fit into float16"):
        load(folder, "float16")


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_have_no_scale_are_refused(quantize: str, value: float, tmp_path: Path) -> None:
    def spoil(weights: Weights) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    folder = changed(tmp_path, spoil)
    with pytest.raises(
        ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are not finite"
    ):
        load_model(folder, device=CPU, quantize=quantize)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    make_model_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelLoadError, match=rf"{name}.*can run code.*safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    make_model_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", [b"", b"\x00" * 64, None])
def test_a_damaged_file_is_refused_by_name(damage: bytes | None, tmp_path: Path) -> None:
    file = make_model_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(ModelLoadError, match=r"^model\.safetensors cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [None, {}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}]
)
def test_an_index_that_names_no_files_of_the_folder_is_refused(weight_map: object, tmp_path: Path) -> None:
    make_model_folder(tmp_path, shards=2)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(ModelLoadError, match="weight_map"):
        load(tmp_path)


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    make_model_folder(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"missing files: model-00002-of-00003\.safetensors$"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    make_model_folder(tmp_path, shards=2)
    names = [f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)]
    (tmp_path / names[0]).write_bytes((tmp_path / names[1]).read_bytes())
    with pytest.raises(ModelLoadError, match=f"is both in {names[0]} and in {names[1]}"):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_progress_counts_bytes_up_to_the_total(shards: int) -> None:
    folder = model_folder("llama", shards=shards)
    seen: list[tuple[int, int]] = []
    load_model(folder, device=CPU, on_progress=lambda done, total: seen.append((done, total)))
    done, totals = zip(*seen, strict=True)
    weights = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    assert set(totals) == {sum(weight.nbytes for weight in weights)}
    assert sorted(set(done)) == list(done)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize(("quantize", "share"), [("none", 1.0), ("int8", 0.3), ("int4", 0.2)])
def test_loading_holds_no_second_copy_of_the_weights(quantize: str, share: float, tmp_path: Path) -> None:
    make_model_folder(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=4096)
    size = (tmp_path / "model.safetensors").stat().st_size
    with Program(str(PEAK_OF_LOADING), str(tmp_path), quantize) as program:
        peak = int(program.line())
    assert size * share * 0.5 < peak < size * (share + 0.25)


@pytest.mark.parametrize(("quantize", "share"), [(None, 1.0), ("int8", 0.6), ("int4", 0.4)])
def test_weights_that_do_not_fit_into_the_free_memory_are_refused_before_any_is_taken(
    quantize: str | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(tmp_path, hidden_size=256, intermediate_size=1024, vocab_size=512)
    whole = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    asked: list[int] = []

    def load(free: int | None) -> Decoder:
        monkeypatch.setattr("personae.engine.loader.free_memory", lambda: free)
        return load_model(
            tmp_path, device=CPU, quantize=quantize, on_progress=lambda done, _: asked.append(done)
        )

    size = load(None).nbytes
    assert (share - 0.35) * whole < size < (share + 0.05) * whole
    asked.clear()
    with pytest.raises(
        ModelLoadError, match=r"^The weights need [\d.]+ GiB in \w+, but [\d.]+ GiB of memory"
    ):
        load(size - 1)
    assert not asked
    assert load(size).nbytes == size


def test_the_size_of_a_tied_output_matrix_counts_once_unless_it_is_quantized() -> None:
    folder = model_folder("qwen3", tie_word_embeddings=True)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert load(folder).nbytes == stored
    int8 = load_model(folder, device=CPU, quantize="int8")
    assert int8.nbytes > sum(tensor.nbytes for _, tensor in int8.tensors())


@pytest.mark.parametrize("case", ["mixtral", "cohere", "deepseek_v3", "qwen3_next"])
def test_a_model_is_loaded_without_modules_that_only_a_compiler_needs(case: str, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, case) if case != "mixtral" else model_folder("mixtral")
    code = (
        "import sys, torch; from pathlib import Path; from personae.engine.loader import load_model; "
        f"load_model(Path({str(folder)!r}), device=torch.device('cpu')); print('sympy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
