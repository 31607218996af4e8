"""Fields of other servers that are accepted with neutral values.

Clients that were written for llama.cpp, SGLang, TGI and others send these with every request. Any other value
would change the answer, so it is refused by name (unless the server ignores unknown fields).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

ANY = object()
"""Any value is neutral while the field that switches this one on is neutral."""

_OFF = (False,)
_LLAMA_CPP: dict[str, Any] = {
    "cache_prompt": (True, False),
    "dry_allowed_length": ANY,
    "dry_base": ANY,
    "dry_multiplier": (0,),
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "dynatemp_exponent": ANY,
    "dynatemp_range": (0,),
    "grammar": ("",),
    "grammar_lazy": _OFF,
    "id_slot": (-1,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": ANY,
    "mirostat_tau": ANY,
    "n_discard": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "penalize_nl": _OFF,
    "post_sampling_probs": _OFF,
    "reasoning_format": ("auto", "deepseek"),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "return_progress": _OFF,
    "return_tokens": _OFF,
    "tfs_z": (1,),
    "timings_per_token": _OFF,
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": ANY,
}
_SGLANG: dict[str, Any] = {
    "custom_logit_processor": (),
    "ebnf": (),
    "lora_path": (),
    "no_stop_trim": _OFF,
    "regex": (),
    "return_hidden_states": _OFF,
    "separate_reasoning": (True,),
    "session_params": (),
    "stream_reasoning": (True,),
    "top_logprobs_num": (0,),
}
_TGI_AND_LORAX: dict[str, Any] = {
    "adapter_id": (),
    "decoder_input_details": _OFF,
    "do_sample": (True,),
    "max_new_tokens": (),
    "return_full_text": _OFF,
    "stop_sequences": ([],),
    "top_n_tokens": (0,),
    "truncate": (),
    "watermark": _OFF,
}
_OTHERS: dict[str, Any] = {
    "debug": _OFF,
    "detokenize": (True,),
    "early_stopping": _OFF,
    "enable_search": _OFF,
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "fallbacks": ([],),
    "guidance_scale": (1,),
    "keep_alive": ANY,
    "metadata": ANY,
    "mirostat_mode": (0,),
    "models": ([],),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "options": ({},),
    "penalty_alpha": (0,),
    "plugins": ([],),
    "provider": ({},),
    "safe_prompt": _OFF,
    "service_tier": ("auto", "default", "flex"),
    "smoothing_factor": (0,),
    "store": _OFF,
    "tfs": (1,),
    "top_a": (0,),
    "transforms": ([],),
    "verbosity": ("medium", "low"),
}

FOREIGN: Mapping[str, Any] = {**_LLAMA_CPP, **_SGLANG, **_TGI_AND_LORAX, **_OTHERS}
"""By field, the values that are accepted in addition to null, or ANY."""


def neutral(name: str, value: Any) -> bool:
    """Whether a value of another server's field is neutral."""
    accepted = FOREIGN.get(name)
    return accepted is not None and (value is None or accepted is ANY or one_of(value, accepted))


def one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether the value is one of `accepted`, where 1 equals 1.0 but true does not equal 1."""
    return any((value is True or value is False) == isinstance(ok, bool) and value == ok for ok in accepted)


def allowed(accepted: tuple[Any, ...]) -> str:
    """The accepted values, as a message names them."""
    return ", ".join(["null", *(msgspec.json.encode(ok).decode() for ok in accepted)])
