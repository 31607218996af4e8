"""Quantized checkpoints of every family, each made by the tool that people use, and the same model with plain
weights, as the tool itself dequantizes them.

`FORMATS` has the formats whose library runs on a CPU. A library that is not installed raises ImportError.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_conversion
import torch
from family_models import CASES, make_family_folder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

GROUP = 32  # inputs that share a scale
SIZES: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
    "moe_latent_size": 32,
    "intermediate_size_mlp": 96,
}
"""Inputs of products in multiples of `GROUP`, as the tools need them."""
PLAIN = (
    "lm_head",
    r"re:.*(gate|router)$",
    r"re:.*router\..*",
    r"re:.*shared_expert_gate$",
    r"re:.*altup\..*",
)
"""What recipes leave as it is: the output matrix and all that chooses experts."""

Make = Callable[[Path, Path, Path], None]
"""From a folder with plain weights in bfloat16 to two more: the checkpoint as the tool writes it, and the
same model with plain weights in float32, as the tool dequantizes them."""


def source(case: str, path: Path) -> Path:
    """A folder of one of `family_models.CASES`, in bfloat16."""
    own = CASES[case][1]
    sizes = {name: size for name, size in SIZES.items() if own.get(name, size) not in (None, 0)}
    if "moe_latent_size" not in own:
        del sizes["moe_latent_size"]
    if case == "gemma3n":
        sizes["intermediate_size"] = [96, 96, 64, 96, 64, 96]
    folder = make_family_folder(path, case, **sizes)
    file = folder / "model.safetensors"
    narrow = {
        name: weight.bfloat16() if weight.is_floating_point() else weight
        for name, weight in load_file(file).items()
    }
    save_file(narrow, file, {"format": "pt"})
    return folder


def make(name: str, case: str, path: Path) -> tuple[Path, Path]:
    """The case's checkpoint in one of `FORMATS`, and a folder of the same model with plain weights in
    float32, both below `path`."""
    if name in GGUF:
        return _gguf(GGUF[name], case, path)
    folder, checkpoint, plain = source(case, path / "source"), path / "checkpoint", path / "plain"
    FORMATS[name](folder, checkpoint, plain)
    return checkpoint, plain


def has(name: str, case: str) -> bool:
    """Whether there is one: of GGUF files, what llama.cpp's converter wrote must be recorded."""
    return name not in GGUF or case in gguf_conversion.CASES


def llmcompressor(folder: Path, out: Path, plain: Path, scheme: str | dict[str, Any]) -> None:
    """llm-compressor rounds to nearest. `scheme`: a name of compressed-tensors', or one for weights."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe, load_quantizable_moe, repack_moe
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from loguru import logger

    logger.disable("llmcompressor")
    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    given: dict[str, Any] = {"targets": "Linear", "scheme": scheme}
    if not isinstance(scheme, str):
        given = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
    oneshot(model=model, recipe=QuantizationModifier(ignore=[*PLAIN], **given))
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linearize_moe(wide)
    own = dict(wide.named_parameters()) | dict(wide.named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in own:
            own[name].data.copy_(tensor)  # the tool rounds norms, too
    for name, module in model.named_modules():
        scale, how = getattr(module, "weight_scale", None), getattr(module, "quantization_scheme", None)
        if scale is not None and how is not None:
            zero, args = getattr(module, "weight_zero_point", None), how.weights
            levels = quantize(module.weight, scale, zero, args, dtype=args.pytorch_dtype())
            weight = dequantize(levels, scale.float(), zero, args, dtype=torch.float32)
            own[f"{name}.weight"].data.copy_(weight)
    model.save_pretrained(out, save_compressed=True)
    _alternate(repack_moe(wide)).save_pretrained(plain)


def _alternate(model: Any) -> Any:
    """The model, with gates and ups of fused experts in turn where the family has them so. The tool's own
    repacking has them in halves everywhere."""
    for module in model.modules():
        if not getattr(module, "is_concatenated", True):
            for each in (module.gate_up_proj, module.gate_up_proj_bias):
                each.data = torch.stack(each.data.chunk(2, -1), -1).flatten(-2)
    return model


def _gguf(kind: gguf.GGMLQuantizationType, case: str, path: Path) -> tuple[Path, Path]:
    """A GGUF file with the metadata of llama.cpp's own converter. Embeddings stay as they are."""
    plain = gguf_conversion.folder_of(case, path / "plain")
    file = plain / "model.safetensors"
    rounded = {
        name: torch.from_numpy(gguf_conversion.rounded(weight.numpy(), kind))
        if "embed" not in name
        else weight
        for name, weight in load_file(file).items()
    }
    save_file(rounded, file, {"format": "pt"})
    return gguf_conversion.write_recorded(path / "model.gguf", plain, case, matrices=kind), plain


def integers(bits: int, **options: Any) -> dict[str, Any]:
    """The scheme of weights of whole numbers."""
    return {"num_bits": bits, "type": "int", "dynamic": False, "symmetric": True} | options


def fp8_blocks(folder: Path, out: Path, plain: Path) -> None:
    """Block FP8 by transformers' own operation: linear modules and experts, as they lie in its files."""
    blocks = [GROUP, GROUP]
    tool = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=blocks)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chosen = {_bits(weight) for weight in _products(model)}
    stored: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = tool.convert({name: weight}) if _bits(weight) in chosen else {name: weight}
        stored |= made
        scales = [each for key, each in made.items() if key.endswith("_scale_inv")]
        wide[name] = (
            Fp8Dequantize(None)._dequantize_one(made[name], scales[0], torch.float32)
            if scales
            else weight.float()
        )
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": blocks}
    for path, tensors, more in (
        (out, stored, {"quantization_config": how}),
        (plain, wide, {"dtype": "float32"}),
    ):
        shutil.copytree(folder, path)
        contiguous = {key: each.contiguous() for key, each in tensors.items()}
        save_file(contiguous, path / "model.safetensors", {"format": "pt"})
        fields = json.loads((folder / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(fields | more))


def _products(model: Any) -> Iterator[Tensor]:
    """The matrices that transformers makes FP8, and each expert's and each half's as files may have them."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for fused in module.parameters():
                if fused.dim() == 3:
                    yield fused
                    yield from (part for each in fused for part in (each, *each.chunk(2)))
        elif type(module) is torch.nn.Linear and name not in ("lm_head",):
            yield module.weight


def _bits(weight: Tensor) -> tuple[torch.Size, bytes]:
    data = weight.detach().contiguous().bfloat16().view(torch.int16).numpy().tobytes()
    return weight.shape, hashlib.sha256(data).digest()


FORMATS: dict[str, Make] = {
    "W4A16": partial(llmcompressor, scheme=integers(4, strategy="group", group_size=GROUP)),
    "W4A16, zero points": partial(
        llmcompressor, scheme=integers(4, strategy="group", group_size=GROUP, symmetric=False)
    ),
    "W8A8": partial(llmcompressor, scheme="W8A8"),
    "MXFP4": partial(llmcompressor, scheme="MXFP4A16"),
    "FP8 blocks": fp8_blocks,
}
GGUF = {
    f"GGUF {kind.name}": kind for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
}
