"""Latent attention, apart from what `tests/engine/test_families.py` compares."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from family_checks import targets
from family_models import make_family_folder
from hf import hf_greedy, hf_logits, hf_model, relative_error
from paged import PagedSequences
from tiny_adapters import make_adapter, make_adapter_folder
from tiny_models import VOCAB

from personae.engine.config_file import read_config
from personae.engine.kv import KVCache
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.errors import AdapterError
from personae.lora.peft import read_adapter

CPU = torch.device("cpu")
CASE = "youtu"  # no experts, so no discrete choices


def test_a_token_keeps_one_latent_vector_and_one_rotated_key_for_all_heads(tmp_path: Path) -> None:
    config = read_config(make_family_folder(tmp_path, CASE))
    assert KVCache.bytes_per_page(config.kv_specs, 16, torch.bfloat16) == 3 * 16 * (40 + 8) * 2


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # PEFT takes its own biases for incomplete tensors
@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_gains_and_shifts_of_an_adapter_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "base", CASE)
    model = make_adapter(folder, rank=5, scale=1.0, targets=targets(read_config(folder)), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and parameter.dim() == 1:
                parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapter")
    prompt = random.Random(3).choices(range(VOCAB), k=30)
    harness = EngineHarness(folder, {"adapter": tmp_path / "adapter"})
    logs = [harness.log("own", prompt, "adapter", max_tokens=24), harness.log("base", prompt, max_tokens=24)]
    played = harness.play(logs)
    assert played["own"].tokens == hf_greedy(model, prompt, 24)
    assert played["base"].tokens == hf_greedy(hf_model(folder), prompt, 24) != played["own"].tokens


def test_an_adapter_that_begins_later_cannot_change_what_is_computed_from_the_cache(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "base", CASE)
    shapes = lora_shapes(load_model(folder, device=CPU))
    adapters = {
        name: make_adapter_folder(
            tmp_path / name, folder, targets=(name,), alora_invocation_tokens=[5], rank=4
        )
        for name in ("kv_a_proj_with_mqa", "kv_b_proj")
    }
    assert read_adapter(adapters["kv_a_proj_with_mqa"], shapes).invocation == (5,)
    with pytest.raises(AdapterError, match="begins at an invocation") as error:
        read_adapter(adapters["kv_b_proj"], shapes)
    assert error.value.param is not None
    assert "kv_b_proj" in error.value.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_close_to_float32(dtype: str, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, CASE)
    tokens = [*range(30, 60)]
    truth = hf_logits(hf_model(folder), tokens)
    decoder = load_model(folder, device=CPU, dtype=dtype)
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    errors = sorted(map(relative_error, decoder.logits(hidden), truth))
    assert errors[len(errors) // 2] < 0.05


def test_a_cache_in_fp8_is_close_to_float32(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, CASE)
    tokens = [*range(30, 60)]
    truth = hf_logits(hf_model(folder), tokens)
    decoder = load_model(folder, device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder, kv_dtype=torch.float8_e4m3fn).forward({"a": tokens})
    errors = sorted(map(relative_error, decoder.logits(hidden), truth))
    assert errors[len(errors) // 2] < 0.1
