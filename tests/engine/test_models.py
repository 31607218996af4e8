"""Each family against Hugging Face transformers, through the paged cache."""

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import hf_greedy, hf_logits, hf_model, quantized, relative_error
from paged import PagedSequences
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, model_folder, write_json

from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import WEIGHT_ONLY
from personae.errors import ModelLoadError
from personae.kernels.registry import reference_only
from personae.kernels.sgmv_calls import Finish

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, rope linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, rope llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama, rope yarn": ("llama", {"rope_scaling": YARN}),
    "llama, rope yarn, attention factor": (
        "llama",
        {"rope_scaling": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama, rope yarn, mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama, rope yarn, not truncated": ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
    "llama, rope_parameters": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "qwen2, upper layers windowed": ("qwen2", {"use_sliding_window": True}),
    "qwen2, windows by layer_types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mimo": ("mimo", {}),
    "mimo tied, without the layer for further tokens": (
        "mimo",
        {"tie_word_embeddings": True, "num_nextn_predict_layers": 0},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied with biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe tied with biases, plain weights, a dense layer": (
        "qwen3_moe",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe, every second layer dense": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 40, "num_experts_per_tok": 1}),
    "olmoe": ("olmoe", {}),
    "olmoe, weights that add up to 1": ("olmoe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "phi3, no window": ("phi3", {"sliding_window": None}),
    "phi3, part of the head rotated": ("phi3", {"partial_rotary_factor": 0.75}),
    "smollm3": ("smollm3", {}),
    "smollm3 tied with biases, layers without rope named": (
        "smollm3",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 1]},
    ),
    "smollm3, windows where no rope is": ("smollm3", {"use_sliding_window": True, "sliding_window": 40}),
    "granite": ("granite", {}),
    "granite tied with biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 tied with biases": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "olmo3, rope yarn": ("olmo3", {"rope_scaling": {**YARN, "rope_type": "yarn"}}),
    "gemma3": ("gemma3", {}),
    "gemma3 tied, rope linear": (
        "gemma3",
        {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}
MIXTURES = ["qwen3_moe", "mixtral", "olmoe"]
FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "mimo",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "gemma3",
]


def decoder_of(folder: Path, dtype: str = "auto") -> Decoder:
    return load_model(folder, device=CPU, dtype=dtype)


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_over_prompts_of_1_to_300_tokens(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder = model_folder(family, **overrides)
    prompt = tokens_of(1, 300)
    truth = hf_logits(hf_model(folder), prompt)
    decoder = decoder_of(folder)
    for length in (1, 2, 17, 41, 128, 300):
        last = PagedSequences(decoder, seed=length).step({"a": prompt[:length]})["a"]
        assert last.dtype == torch.float32
        assert relative_error(last, truth[length - 1]) < 1e-4
    # A causal model's logits after token n are those of the prompt of n tokens: so all lengths at once.
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": prompt})
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", [reference_only, nullcontext], ids=["reference", "own"])
def test_decoding_token_by_token_gives_the_logits_of_transformers_at_every_length(
    family: str, kernels: Callable[[], AbstractContextManager[None]]
) -> None:
    folder = model_folder(family)
    prompt = tokens_of(8, 150)
    truth = hf_logits(hf_model(folder), prompt)
    with kernels():
        decoder = load_model(folder, device=CPU, dtype="float32")
    growing = PagedSequences(decoder, page_size=8)
    for index, token in enumerate(prompt):
        assert relative_error(growing.step({"a": [token]})["a"], truth[index]) < 1e-4


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", WEIGHT_ONLY)
def test_quantized_weights_are_rounded_and_nothing_else(quantize: str, family: str, tied: bool) -> None:
    folder = model_folder(family, tie_word_embeddings=tied)
    prompt = tokens_of(9, 100)
    decoder = load_model(folder, device=CPU, quantize=quantize)
    hidden, _ = PagedSequences(decoder).forward({"a": prompt})
    model = hf_model(folder)
    exact, truth = hf_logits(model, prompt), hf_logits(quantized(model, quantize), prompt)
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4
    assert max(map(relative_error, exact, truth)) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_continuations_are_those_of_transformers(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    folder = model_folder(family, **overrides)
    prompt = tokens_of(2, 23)
    assert PagedSequences(decoder_of(folder)).greedy("a", prompt, 64) == hf_greedy(
        hf_model(folder), prompt, 64
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_saved_by_transformers_itself_loads(family: str, tmp_path: Path) -> None:
    model = hf_model(model_folder(family))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved  # the spelling of transformers 5
    assert (tmp_path / "model.safetensors.index.json").exists()
    prompt = tokens_of(3, 50)
    logits = PagedSequences(decoder_of(tmp_path)).step({"a": prompt})["a"]
    assert relative_error(logits, hf_logits(model, prompt)[-1]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill_equals_unchunked(family: str, chunk: int) -> None:
    decoder = decoder_of(model_folder(family))
    prompt = tokens_of(4, 90)
    whole = PagedSequences(decoder, seed=1).step({"a": prompt})["a"]
    parts = PagedSequences(decoder, seed=2)
    for first in range(0, len(prompt), chunk):
        logits = parts.step({"a": prompt[first : first + chunk]})["a"]
    assert relative_error(logits, whole) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_of_prefill_and_decode_equals_solo_runs(family: str) -> None:
    decoder = decoder_of(model_folder(family))
    prompts = {
        name: tokens_of(seed, count)
        for seed, (name, count) in enumerate([("a", 60), ("b", 1), ("c", 33), ("d", 100), ("e", 16)])
    }
    together = PagedSequences(decoder, seed=3)
    together.step({"a": prompts["a"][:59], "d": prompts["d"][:40]})
    together.step({"e": prompts["e"][:15]})
    mixed = together.step(
        {
            "d": prompts["d"][40:],
            "a": prompts["a"][59:],
            "b": prompts["b"],
            "c": prompts["c"],
            "e": prompts["e"][15:],
        }
    )
    for name, prompt in prompts.items():
        solo = PagedSequences(decoder, seed=5).step({name: prompt})[name]
        assert relative_error(mixed[name], solo) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_runs_within_tolerance(family: str, dtype: str, tolerance: float) -> None:
    folder = model_folder(family)
    prompt = tokens_of(6, 80)
    truth = hf_logits(hf_model(folder), prompt)[60:]
    decoder = decoder_of(folder, dtype)
    sequences = PagedSequences(decoder)
    sequences.step({"a": prompt[:60]})
    hidden, _ = sequences.forward({"a": prompt[60:]})
    logits = decoder.logits(hidden)
    assert sequences.kv.data.dtype == decoder.dtype == getattr(torch, dtype)
    assert logits.dtype == torch.float32
    errors = list(map(relative_error, logits, truth))
    if family in MIXTURES:  # where two experts are nearly as good the router may choose the other
        assert sorted(errors)[len(errors) // 2] < 4 * tolerance
    else:
        assert errors[-1] < tolerance


@pytest.mark.parametrize("context", [64, 300], ids=["short factors", "long factors"])
def test_longrope_takes_the_factors_of_the_longest_context_that_is_served(context: int) -> None:
    pairs = 6  # 0.75 of a head of 16
    longrope = {
        "type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }
    folder = model_folder(
        "phi3",
        rope_scaling=longrope,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        sliding_window=None,
    )
    decoder = load_model(folder, device=CPU, max_position=context)
    prompt = tokens_of(9, context)
    truth = hf_logits(hf_model(folder), prompt)  # transformers decides by the length of the prompt
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": prompt})
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_the_decoder_of_a_model_that_reads_images_is_served(family: str, root: str, tmp_path: Path) -> None:
    folder = model_folder(family)
    config = json.loads((folder / "config.json").read_text())
    names = {"gemma3": "Gemma3ForConditionalGeneration", "mistral": "Mistral3ForConditionalGeneration"}
    around = {"architectures": [names[family]], "vision_config": {}, "torch_dtype": "float32"}
    write_json(tmp_path / "config.json", around | {"text_config": config, "tie_word_embeddings": False})
    head = "lm_head." if root.startswith("model") else "language_model.lm_head."
    tensors = {
        name.replace("model.", root, 1)
        if name.startswith("model.")
        else name.replace("lm_head.", head): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    overlap = {"vision_tower.x.weight": torch.ones(2, 2), "multi_modal_projector.y.weight": torch.ones(3)}
    prefix = "model." if root.startswith("model") else ""
    save_file(
        tensors | {prefix + name: tensor for name, tensor in overlap.items()}, tmp_path / "model.safetensors"
    )
    prompt = tokens_of(3, 60)
    plain, decoder = (
        PagedSequences(decoder_of(path)).step({"a": prompt})["a"] for path in (folder, tmp_path)
    )
    assert torch.equal(plain, decoder)
    save_file(tensors | {"audio_tower.z.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unexpected: audio_tower\.z\.weight"):
        decoder_of(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gemma_3_with_images_as_transformers_saves_it_gives_the_same_logits(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = json.loads((model_folder("gemma3") / "config.json").read_text())
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    torch.manual_seed(3)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, tie_word_embeddings=True
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = tokens_of(4, 80)
    logits = PagedSequences(decoder_of(tmp_path)).step({"a": prompt})["a"]
    assert relative_error(logits, hf_logits(model, prompt)[-1]) < 1e-4


def test_lora_is_called_once_per_group_with_views_of_the_outputs() -> None:
    class Doubling:
        """Doubles what the named group puts out in layer 1, and notes the calls."""

        def __init__(self, doubled: str) -> None:
            self.doubled = doubled
            self.calls: list[tuple[int, str, list[tuple[int, ...]]]] = []

        def begin(self, layer: int, group: str, x: torch.Tensor) -> Finish:
            def finish(ys: tuple[torch.Tensor, ...]) -> None:
                self.calls.append((layer, group, [tuple(part.shape) for part in (x, *ys)]))
                if (layer, group) == (1, self.doubled):
                    for y in ys:
                        y.mul_(2)

            return finish

        def routed(self, tokens: torch.Tensor, experts: torch.Tensor) -> None:
            return None

        def fused(self) -> None:
            return None

        def embed(self, tokens: torch.Tensor, x: torch.Tensor) -> None:
            self.calls.append((-1, "embed", [tuple(tokens.shape), tuple(x.shape)]))

    decoder = decoder_of(model_folder("llama"))
    prompt = tokens_of(7, 5)
    plain = PagedSequences(decoder).step({"a": prompt})["a"]
    for group in ("qkv", "o", "gate_up", "down"):
        lora = Doubling(group)
        changed = PagedSequences(decoder).step({"a": prompt}, lora=lora)["a"]
        assert relative_error(changed, plain) > 1e-3
    assert lora.calls[0] == (-1, "embed", [(5,), (5, 64)])
    assert lora.calls[1:] == [
        call
        for layer in range(3)
        for call in (
            (layer, "qkv", [(5, 64), (5, 64), (5, 32), (5, 32)]),
            (layer, "o", [(5, 64), (5, 64)]),
            (layer, "gate_up", [(5, 64), (5, 96), (5, 96)]),
            (layer, "down", [(5, 96), (5, 64)]),
        )
    ]
