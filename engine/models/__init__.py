"""Model families, one small file each, imported when a checkpoint names their architecture.

A family file has one function, `translate(architecture, fields) -> ModelConfig`, which interprets the
family's `config.json`. All families share the arithmetic and the tensor names (`decoder.py`, `layer.py`). To
add a family, write its file and add its architecture here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personae.engine.config import ModelConfig
    from personae.engine.fields import Fields

    Translate = Callable[[str, Fields], ModelConfig]

_TABLE = (  # model_type, architecture, file
    ("arcee", "ArceeForCausalLM", "nemotron"),
    ("bamba", "BambaForCausalLM", "bamba"),
    ("cohere", "CohereForCausalLM", "cohere"),
    ("cohere2", "Cohere2ForCausalLM", "cohere"),
    ("cohere2_moe", "Cohere2MoeForCausalLM", "cohere2_moe"),
    ("cwm", "CwmForCausalLM", "cwm"),
    ("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek"),
    ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek"),
    ("dots1", "Dots1ForCausalLM", "dots1"),
    ("ernie4_5", "Ernie4_5ForCausalLM", "ernie"),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie"),
    ("exaone4", "Exaone4ForCausalLM", "exaone4"),
    ("exaone_moe", "ExaoneMoeForCausalLM", "exaone4"),
    ("falcon_h1", "FalconH1ForCausalLM", "falcon_h1"),
    ("flex_olmo", "FlexOlmoForCausalLM", "olmoe"),
    ("gemma", "GemmaForCausalLM", "gemma"),
    ("gemma2", "Gemma2ForCausalLM", "gemma2"),
    ("gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
    ("gemma3_text", "Gemma3ForCausalLM", "gemma3"),
    ("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n"),
    ("gemma3n_text", "Gemma3nForCausalLM", "gemma3n"),
    ("gemma4", "Gemma4ForConditionalGeneration", "gemma4"),
    ("gemma4_text", "Gemma4ForCausalLM", "gemma4"),
    ("glm", "GlmForCausalLM", "glm"),
    ("glm4", "Glm4ForCausalLM", "glm"),
    ("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe"),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "deepseek"),
    ("gpt_oss", "GptOssForCausalLM", "gpt_oss"),
    ("granite", "GraniteForCausalLM", "granite"),
    ("granitemoe", "GraniteMoeForCausalLM", "granitemoe"),
    ("granite_swa", "GraniteSWAForCausalLM", "granite_swa"),
    ("granitemoe_swa", "GraniteMoeSWAForCausalLM", "granite_swa"),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", "granitemoe"),
    ("granitemoeshared", "GraniteMoeSharedForCausalLM", "granitemoe"),
    ("helium", "HeliumForCausalLM", "helium"),
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "hunyuan"),
    ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "hunyuan"),
    ("hy_v3", "HYV3ForCausalLM", "hy_v3"),
    ("hyperclovax", "HyperCLOVAXForCausalLM", "hyperclovax"),
    ("iquestcoder", "IQuestCoderForCausalLM", "llama"),
    ("internlm3", "InternLM3ForCausalLM", "internlm3"),
    ("jais2", "Jais2ForCausalLM", "nemotron"),
    ("lfm2", "Lfm2ForCausalLM", "lfm2"),
    ("lfm2_moe", "Lfm2MoeForCausalLM", "lfm2"),
    ("llama", "LlamaForCausalLM", "llama"),
    ("llama4", "Llama4ForConditionalGeneration", "llama4"),
    ("llama4_text", "Llama4ForCausalLM", "llama4"),
    ("mellum", "MellumForCausalLM", "mellum"),
    ("mimo", "MiMoForCausalLM", "mimo"),
    ("minicpm3", "MiniCPM3ForCausalLM", "deepseek"),
    ("minimax_m2", "MiniMaxM2ForCausalLM", "minimax_m2"),
    ("ministral", "MinistralForCausalLM", "ministral"),
    ("ministral3", "Ministral3ForCausalLM", "ministral3"),
    ("mistral", "MistralForCausalLM", "mistral"),
    ("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
    ("mistral4", "Mistral4ForCausalLM", "deepseek"),
    ("mixtral", "MixtralForCausalLM", "mixtral"),
    ("nemotron", "NemotronForCausalLM", "nemotron"),
    ("nemotron_h", "NemotronHForCausalLM", "nemotron_h"),
    ("olmo2", "Olmo2ForCausalLM", "olmo"),
    ("olmo3", "Olmo3ForCausalLM", "olmo"),
    ("olmoe", "OlmoeForCausalLM", "olmoe"),
    ("phi", "PhiForCausalLM", "phi"),
    ("phi3", "Phi3ForCausalLM", "phi3"),
    ("qwen2", "Qwen2ForCausalLM", "qwen2"),
    ("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2_moe"),
    ("qwen3", "Qwen3ForCausalLM", "qwen3"),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_next"),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_next"),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "qwen3_next"),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", "qwen3_next"),
    ("qwen3_next", "Qwen3NextForCausalLM", "qwen3_next"),
    ("seed_oss", "SeedOssForCausalLM", "seed_oss"),
    ("smollm3", "SmolLM3ForCausalLM", "smollm3"),
    ("solar_open", "SolarOpenForCausalLM", "solar_open"),
    ("stablelm", "StableLmForCausalLM", "stablelm"),
    ("starcoder2", "Starcoder2ForCausalLM", "starcoder2"),
    ("vaultgemma", "VaultGemmaForCausalLM", "gemma2"),
    ("youtu", "YoutuForCausalLM", "deepseek"),
)
FAMILIES = {architecture: file for _, architecture, file in _TABLE}
"""The file of each architecture."""
MODEL_TYPES = {kind: architecture for kind, architecture, _ in _TABLE}
"""The architecture of a config.json that only has a `model_type`."""
WHOLE = frozenset(
    ("gemma3", "gemma3_text", "granite", "llama", "mimo", "mistral", "mistral3", "mixtral", "olmo2", "olmo3")
) | {"olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
"""Those, by `model_type`, that the tests compare with transformers in every dtype. The others they compare in
float32."""


def family(architecture: str) -> Translate | None:
    """The `translate` function of the architecture's family; None if it is not supported."""
    name = FAMILIES.get(architecture)
    if name is None:
        return None
    translate: Translate = import_module(f"personae.engine.models.{name}").translate
    return translate
