import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import COMMON, FAMILIES, write_json

from personae.engine.config import ModelConfig
from personae.engine.config_file import read_config
from personae.engine.generation_config import GenerationDefaults, read_generation_defaults
from personae.errors import ModelLoadError

GEMMA = {"architectures": ["Gemma3ForCausalLM"]}
PHI = {"architectures": ["Phi3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def folder(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """A folder with config.json alone; an override of ... leaves the field out."""
    config = {**COMMON, **FAMILIES[family], **overrides}
    write_json(path / "config.json", {name: value for name, value in config.items() if value is not ...})
    return path


def parts(config: ModelConfig) -> tuple[Any, Any]:
    """The blocks of the first layer."""
    return config.layer_specs[0].attention, config.layer_specs[0].mlp


def test_the_sizes_are_read(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path, "qwen3"))
    attention, mlp = parts(config)
    assert (config.layers, attention.heads, attention.kv_heads, attention.head_dim) == (3, 4, 2, 32)
    assert (config.vocab_size, config.hidden_size, mlp.size) == (512, 64, 96)
    assert {key: (site.inputs, site.outputs) for key, site in config.lora_sites.items()} == {
        "q": (64, 128),
        "k": (64, 64),
        "v": (64, 64),
        "o": (128, 64),
        "gate": (64, 96),
        "up": (64, 96),
        "down": (96, 64),
    }
    assert config.dtype == "float32"
    assert attention.qk_norm == "head"
    assert not attention.qkv_bias


def test_what_old_files_leave_out_has_its_familys_default(tmp_path: Path) -> None:
    config = read_config(
        folder(
            tmp_path,
            num_key_value_heads=...,
            rope_theta=...,
            rms_norm_eps=...,
            torch_dtype=...,
            tie_word_embeddings=...,
        )
    )
    attention, _ = parts(config)
    assert attention.kv_heads == attention.heads == 4
    assert attention.rope.theta == 10000.0
    assert config.eps == 1e-6
    assert config.dtype is None
    assert not config.tie


def test_integers_are_taken_where_a_float_is_meant(tmp_path: Path) -> None:
    assert parts(read_config(folder(tmp_path, rope_theta=500000)))[0].rope.theta == 500000.0


@pytest.mark.parametrize(
    "retokenizer", [{"torch_dtype": "bfloat16"}, {"torch_dtype": ..., "dtype": "bfloat16"}]
)
def test_both_spellings_of_the_dtype_are_read(retokenizer: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(folder(tmp_path, **retokenizer)).dtype == "bfloat16"


@pytest.mark.parametrize(
    "retokenizer",
    [
        {"rope_theta": 7.0, "rope_scaling": YARN},
        {"rope_theta": 7.0, "rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}},
        {"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 7.0}},
    ],
)
def test_all_spellings_of_the_rope_are_the_same(retokenizer: dict[str, Any], tmp_path: Path) -> None:
    rope = parts(read_config(folder(tmp_path, **retokenizer)))[0].rope
    assert (rope.theta, rope.type, rope.factor, rope.original_max_position) == (7.0, "yarn", 4.0, 256)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 1024),
        ({"rope_type": "default"}, 1024),
        ({"type": "linear", "factor": 2.0}, 2048),
        (YARN, 1024),
        ({**YARN, "factor": 16.0}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1024),
    ],
)
def test_the_context_length_counts_the_stretching(
    rope: dict[str, Any] | None, context: int, tmp_path: Path
) -> None:
    assert read_config(folder(tmp_path, rope_scaling=rope)).max_position == context


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {}, (40, 40, 40)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True}, (None, 40, 40)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_the_sliding_window_is_that_of_each_layer(
    family: str, overrides: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = read_config(folder(tmp_path, family, **overrides))
    assert tuple(layer.attention.window for layer in config.layer_specs) == windows


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("architectures", {"architectures": ["MambaForCausalLM"]}),
        ("architectures", {"architectures": ..., "model_type": ...}),
        ("model_type", {"architectures": ..., "model_type": "mamba"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("rope_scaling: rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("rope_scaling: rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("rope_scaling: factor", {"rope_scaling": {"type": "linear"}}),
        ("rope_scaling: factor", {"rope_scaling": {"type": "linear", "factor": -1}}),
        ("rope_scaling: factor", {"rope_scaling": {"type": "linear", "factor": "two"}}),
        ("rope_scaling: low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        (
            "rope_scaling: high_freq_factor",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        ),
        ("rope_scaling", {"rope_scaling": "linear"}),
        ("rope_parameters: full_attention", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        ("rope_parameters: partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("rope_theta", {"rope_theta": 0}),
        ("rope_parameters: llama_4_scaling_beta", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}),
        (
            "text_config: model_type",
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "qwen2"},
            },
        ),
        ("final_logit_softcapping", {**GEMMA, "final_logit_softcapping": 30.0}),
        ("hidden_activation", {**GEMMA, "hidden_activation": "relu"}),
        ("no_rope_layers", {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}),
        ("partial_rotary_factor", {**PHI, "partial_rotary_factor": 0.01}),
        ("rope_scaling: rope_type", {**PHI, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("rope_scaling: short_factor", {**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1]}}),
        ("vocab_size", {"vocab_size": ...}),
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("hidden_size", {"hidden_size": "64"}),
        ("hidden_size", {"hidden_size": 66}),
        ("intermediate_size", {"intermediate_size": True}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 15}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"^config\.json: {field}: "):
        read_config(folder(tmp_path, **overrides))


def test_mimo_is_qwen2_with_layers_that_the_decoder_does_without(tmp_path: Path) -> None:
    mimo = read_config(
        folder(tmp_path, "qwen2", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    )
    qwen2 = read_config(folder(tmp_path, "qwen2"))
    assert (mimo.mtp_layers, qwen2.mtp_layers) == (1, 0)
    assert mimo.layer_specs == qwen2.layer_specs
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers: must be at least 0"):
        read_config(folder(tmp_path, "mimo", num_nextn_predict_layers=-1))


def test_who_names_an_architecture_that_is_not_served_is_told_which_are(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r'"MambaForCausalLM" is not supported; supported are: .*Qwen3ForCausalLM'
    ):
        read_config(folder(tmp_path, architectures=["MambaForCausalLM"]))


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ],
)
def test_layer_types_that_cannot_be_meant_are_refused(overrides: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="layer_types"):
        read_config(folder(tmp_path, "qwen2", **overrides))


@pytest.mark.parametrize("text", ["{", "[]", "\ud800"])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    values = {
        "eos_token_id": [2, 0],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_generation_defaults(folder(tmp_path), 512) == GenerationDefaults(
        eos=(2, 0), temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.05
    )


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([1, 5], (1, 5)), (None, ())])
def test_without_a_generation_config_eos_is_the_configs(
    eos: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_generation_defaults(folder(tmp_path, eos_token_id=eos), 512) == GenerationDefaults(
        eos=expected
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", 512),
        ("eos_token_id", [2, -1]),
        ("eos_token_id", "</s>"),
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", -1.0),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
    ],
)
def test_generation_defaults_out_of_range_are_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ModelLoadError, match=rf"^generation_config\.json: {field}: "):
        read_generation_defaults(folder(tmp_path), 512)
