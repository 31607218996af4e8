"""What the keys of a config.json mean that no family reads: nothing, or the load stops with the key's name.

`config_keys.json` is made from transformers (`tests/support/config_keys.py`): the keys of each family's
config class with their defaults, and all names that mean something to some model. A key that transformers
does not know either changes nothing there, and is named in the log.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from personae.engine.fields import Fields
from personae.errors import as_json

logger = logging.getLogger(__name__)

MEANINGLESS = frozenset(
    [
        *(
            "architectures",
            "model_type",
            "auto_map",
            "transformers_version",
            "tokenizer_class",
            "name_or_path",
        ),
        *("torch_dtype", "dtype", "vocab_size", "use_cache", "pretraining_tp", "gradient_checkpointing"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),  # the tokenizer's
        # What heads return, and heads other than that of a language model.
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("use_return_dict", "torchscript", "problem_type", "id2label", "label2id", "num_labels"),
        *("finetuning_task", "task_specific_params", "decoder_start_token_id", "forced_bos_token_id"),
        *(
            "forced_eos_token_id",
            "is_decoder",
            "is_encoder_decoder",
            "add_cross_attention",
            "cross_attention_hidden_size",
        ),
        *("tie_encoder_decoder", "chunk_size_feed_forward", "pruned_heads", "prefix", "unpadded_vocab_size"),
        # Training, and the choice of kernels.
        *(
            "router_jitter_noise",
            "use_bfloat16",
            "tf_legacy_loss",
            "attn_implementation",
            "moe_implementation",
        ),
        *(
            "experts_implementation",
            "embd_layer",
            "bad_words_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
        ),
        # How to generate: transformers takes this from generation_config.json.
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups"),
        *("repetition_penalty", "diversity_penalty", "length_penalty", "encoder_no_repeat_ngram_size"),
        *("no_repeat_ngram_size", "max_length", "min_length", "max_new_tokens", "early_stopping"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
        *(
            "transformers.js_config",
            "cache_implementation",
            "exponential_decay_length_penalty",
            "max_sequence_length",
            "model_max_length",
        ),
        # The part that reads images, which is not served.
        *("vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
        *(
            "boi_token_id",
            "eoi_token_id",
            "mm_tokens_per_image",
            "spatial_merge_size",
            "projector_hidden_act",
        ),
        *(
            "vision_feature_layer",
            "multimodal_projector_bias",
            "vision_start_token_id",
            "vision_end_token_id",
            "video_token_id",
        ),
        "quantization_config",  # the weights' format: `engine/checkpoints/quantized/` reads it
        # Notes of tools that train.
        *("unsloth_version", "unsloth_fixed", "unsloth_tiled_mlp"),
    ]
)
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias", "use_bias", "use_qk_norm"), False),
    **dict.fromkeys(("use_mrope", "rope_interleaved", "use_bidirectional_attention"), False),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor", "is_causal"), 1),
}
"""Keys that mean nothing with this value."""
FIXED = {
    "Gemma3ForCausalLM": ("hidden_act",),  # it reads hidden_activation
    "Gemma3ForConditionalGeneration": ("hidden_act",),
    "MiMoForCausalLM": ("attention_bias",),
    "Qwen2ForCausalLM": ("attention_bias",),
}
"""Keys that mean nothing to a family, which has one of their values always."""
_TRAINING = re.compile(r"dropout|pdrop$|initializer|aux_loss|z_loss|_loss_coef$|init_std$")
_ROPE = re.compile(r": rope_\w+")


def check_unread(fields: Fields, architecture: str) -> None:
    """Raises ModelLoadError for a key that the family has not read and that may change what the model
    computes."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text())
    own: dict[str, Any] = table["families"][architecture]
    others = {*table["others"], *(name for family in table["families"].values() for name in family)}
    unknown = []
    for place, name, value in fields.unread():
        if name in MEANINGLESS or name in FIXED.get(architecture, ()) or name.startswith("_"):
            continue
        if _TRAINING.search(name) or any(name in known and known[name] == value for known in (own, NEUTRAL)):
            continue
        if name in others or name in NEUTRAL or _ROPE.search(place.where):
            raise place.error(name, f"{as_json(value)} is not supported for {architecture}")
        unknown.append(name)
    if unknown:
        logger.warning(
            "%s: transformers does not know these keys, and they change nothing: %s",
            fields.where,
            ", ".join(unknown),
        )
