"""Hugging Face transformers as the reference: its model of a folder, in float32, with the plainest
attention."""

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from content import Content, content_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from personae.engine.quantization.int4 import Int4Weight


class MiMoConfig(Qwen2Config):
    """MiMo is Qwen2 with a further layer. transformers has the one and not the other."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with MiMo's name. It does without the layer."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\.",)


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder's model, which the caller may change. Every tensor of the file must have been used."""
    return copy.deepcopy(_loaded(content_of(folder), dtype))


@lru_cache(maxsize=8)
def _loaded(content: Content, dtype: torch.dtype) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        content.base, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def quantized(model: Any, quantization: str) -> Any:
    """The model with the weights of its linear modules rounded, but not those of adapters.

    To int8, and always for the output matrix: to 255 steps per row. To int4: by the quantizer itself, whose
    quality is tested separately. To fp8: weights and what they are multiplied by, each row with a scale;
    the output matrix stays.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # [experts, outputs, inputs]
            rounded = [_rounded(weight, quantization) for weight in parameter]
            parameter.copy_(torch.stack(rounded))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "modules_to_save" not in name:
            if quantization == "fp8":
                if "lm_head" not in name:
                    module.weight = torch.nn.Parameter(_in_fp8(module.weight))
                    module.register_forward_pre_hook(lambda _module, args: (_in_fp8(args[0]),))
                continue
            way = "int8" if "lm_head" in name else quantization
            module.weight = torch.nn.Parameter(_rounded(module.weight, way))
    return model


def _in_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).nan_to_num(0).to(torch.float8_e4m3fn).float() * scale


def _rounded(weight: Tensor, quantization: str) -> Tensor:
    if quantization == "int8":
        step = weight.abs().max(dim=1, keepdim=True).values / 127
        return (weight / step).round() * step
    kept = Int4Weight.empty(*weight.shape, weight.device)
    kept.copy_(weight)
    return kept.plain(torch.float32)


@torch.no_grad()
def hf_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after each token, [len(tokens), vocab] float32."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def hf_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation; EOS is ignored."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest true value."""
    return float((found - truth).abs().max() / truth.abs().max())
