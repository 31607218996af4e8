"""Quantized checkpoints of every family, each made by the tool that people use, and the same model with plain
weights, as the tool itself dequantizes them.

`FORMATS` has the formats whose library runs on a CPU. A library that is not installed raises ImportError.
"""

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gguf
import gguf_conversion
import torch
import torch.nn.functional as F
from family_models import CASES, make_family_folder
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao_weights import plain_weight
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, TorchAoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from personae.engine.quantization.fp8 import Fp8

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
PACKED = ("qweight", "qzeros", "scales", "g_idx")
"""The parts of a module in files of GPTQ and AWQ."""

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


@contextmanager
def unrounded() -> Iterator[None]:
    """Products with weights in FP8 have inputs as they are, as on a GPU before Ada. So what they give is
    compared exactly: transformers rounds none."""
    with patch.object(Fp8, "apply", lambda self, x, bias: F.linear(x, self.plain(), bias)):
        yield


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

    def dequantized(module: Any) -> Tensor | None:
        scale, how = getattr(module, "weight_scale", None), getattr(module, "quantization_scheme", None)
        if scale is None or how is None:
            return None
        zero, args = getattr(module, "weight_zero_point", None), how.weights
        levels = quantize(module.weight, scale, zero, args)
        found: Tensor = dequantize(levels, scale.float(), zero, args, dtype=torch.float32)
        return found

    _copy_weights(model, wide, dequantized)
    model.save_pretrained(out, save_compressed=True)
    _alternate(repack_moe(wide)).save_pretrained(plain)


def _copy_weights(model: Any, wide: Any, dequantized: Callable[[Any], Tensor | None]) -> None:
    """Gives the plain model `wide` the weights of all modules of `model` that are quantized."""
    found = {
        name: weight for name, module in model.named_modules() if (weight := dequantized(module)) is not None
    }
    if not found:
        raise ValueError("no module is quantized")
    for name, weight in found.items():
        wide.get_submodule(name).weight.data.copy_(weight)


def in_transformers(
    folder: Path,
    out: Path,
    plain: Path,
    config: Callable[[], Any],
    dequantized: Callable[[Any], Tensor | None],
) -> None:
    """A tool that transformers calls while it loads a model. It changes linear modules alone: experts that
    are one tensor stay as they are."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config(), device_map="cpu"
    )
    model.save_pretrained(out)  # first: bitsandbytes changes its weights when they are used
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _copy_weights(model, wide, dequantized)
    wide.save_pretrained(plain)


def bitsandbytes(**options: Any) -> Make:
    """bitsandbytes. Of four bits this is its own plain dequantization: that in C++ takes wrong scales where a
    row is no multiple of a block."""

    def dequantized(module: Any) -> Tensor | None:
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
        from bitsandbytes.functional import int8_vectorwise_dequant

        weight = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            state = weight.quant_state
            wide: Tensor = _dequantize_4bit_compute(
                weight.data.flatten(), state.absmax, state.code, state.blocksize, state.shape, torch.float32
            )
        elif type(weight).__name__ == "Int8Params":
            wide = int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            return None
        return wide

    return partial(in_transformers, config=lambda: BitsAndBytesConfig(**options), dequantized=dequantized)


def torchao(name: str, **options: Any) -> Make:
    """torchao. name, options: of its configuration."""

    def config() -> TorchAoConfig:
        import torchao.quantization as tool

        given = {key: option(tool) if callable(option) else option for key, option in options.items()}
        return TorchAoConfig(getattr(tool, name)(**given), modules_to_not_convert=["lm_head", ".*altup"])

    def dequantized(module: Any) -> Tensor | None:
        own = getattr(module, "weight", None)
        return plain_weight(own) if hasattr(own, "qdata") else None

    return partial(in_transformers, config=config, dequantized=dequantized)


def torchao_dynamic(folder: Path, out: Path, plain: Path) -> None:
    """torchao's FP8 with activations in FP8. It asks for a GPU, which writing weights does not need."""
    import torchao.quantization.quant_api as tool

    make = torchao("Float8DynamicActivationFloat8WeightConfig", granularity=lambda tool: tool.PerRow())
    with patch.object(tool, "_check_hardware_support"):
        make(folder, out, plain)


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


def gptqmodel(folder: Path, out: Path, plain: Path, **options: Any) -> None:
    """GPTQModel, calibrated with random tokens. It takes experts apart. It changes transformers, too, so it
    has processes of its own."""
    apart = multiprocessing.get_context("forkserver")
    apart.set_forkserver_preload(["family_formats", "gptqmodel"])
    with ProcessPoolExecutor(1, apart) as pool:
        pool.submit(_gptqmodel, folder, out, plain, options).result()
    made, wanted = (load_file(path / "model.safetensors").keys() for path in (plain, folder))
    if wanted - made:
        _name_as_transformers(folder, plain)


def _name_as_transformers(folder: Path, plain: Path) -> None:
    """Writes `plain` anew by transformers. The tool names tensors as transformers' modules, some of which it
    has taken apart."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = load_file(plain / "model.safetensors")
    buffers = {name: place for name, place in model.named_buffers() if name in own}
    for name, place in [*model.named_parameters(), *buffers.items()]:
        if name not in own:
            block, _, last = name.removesuffix(".weight").rpartition(".")
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            blocks = [f"{block}.{each}" for each in range(len(place))] if place.dim() == 3 else [block]
            whole = [torch.cat([own.pop(f"{each}.{part}.weight") for part in parts]) for each in blocks]
            own[name] = torch.stack(whole) if place.dim() == 3 else whole[0]
        place.data.copy_(own.pop(name))
    if own:
        raise ValueError(f"transformers has no {sorted(own)[0]}")
    model.save_pretrained(plain)


def _gptqmodel(folder: Path, out: Path, plain: Path, options: dict[str, Any]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.looper.awq_processor import AWQProcessor

    torch.manual_seed(1)
    rows = [
        {"input_ids": torch.randint(4, 256, (1, 64)), "attention_mask": torch.ones(1, 64).long()}
        for _ in range(8)
    ]
    config = QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, **options)
    tool = GPTQModel.load(str(folder), config, device="cpu")
    with patch.object(AWQProcessor, "_search_best_clip", return_value=[]):  # it needs 64 outputs or more
        tool.quantize(rows, batch_size=1)
    tool.save(str(out))
    stored = {name: weight for file in out.glob("*.safetensors") for name, weight in load_file(file).items()}
    wide: dict[str, Tensor] = {}
    for name, weight in stored.items():
        module, _, end = name.rpartition(".")
        own = {key: stored[f"{module}.{key}"] for key in PACKED if f"{module}.{key}" in stored}
        if end == "qweight":
            wide[f"{module}.weight"] = _of_awq(own) if options.get("method") == "awq" else _of_gptq(own)
        elif end not in PACKED:
            wide[name] = weight.float()
    _write_folder(folder, plain, wide, {"dtype": "float32"})


def _of_gptq(own: dict[str, Tensor]) -> Tensor:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    outputs, inputs = own["qweight"].shape[1], own["qweight"].shape[0] * 8
    module = TorchLinear(
        bits=4, group_size=GROUP, sym=True, desc_act=False, in_features=inputs, out_features=outputs
    )
    for name, tensor in own.items():
        getattr(module, name).data = tensor.float() if name == "scales" else tensor.clone()
    convert_gptq_v1_to_v2_format_module(module, bits=4, pack_dtype=torch.int32)
    weight: Tensor = module.dequantize_weight()
    return weight.T.float()


def _of_awq(own: dict[str, Tensor]) -> Tensor:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    weight: Tensor = dequantize_gemm(own["qweight"], own["qzeros"], own["scales"].float(), 4, GROUP)
    return weight.T.float()


def _write_folder(folder: Path, path: Path, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
    """A copy of a model's folder with these tensors, and with more keys of its config."""
    shutil.copytree(folder, path)
    contiguous = {key: each.contiguous() for key, each in tensors.items()}
    save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | more))


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
    _write_folder(folder, out, stored, {"quantization_config": how})
    _write_folder(folder, plain, wide, {"dtype": "float32"})


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
    "FP8": partial(llmcompressor, scheme="FP8_DYNAMIC"),
    "FP8 blocks": fp8_blocks,
    "GPTQ": partial(gptqmodel, sym=True),
    "AWQ": partial(gptqmodel, sym=False, method="awq", format="gemm"),
    "bitsandbytes NF4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "torchao int8": torchao("Int8WeightOnlyConfig", version=2),
    "torchao int4": torchao(
        "IntxWeightOnlyConfig",
        weight_dtype=torch.int4,
        granularity=lambda tool: tool.PerGroup(GROUP),
    ),
    "torchao FP8": torchao("Float8WeightOnlyConfig"),
    "torchao FP8, dynamic": torchao_dynamic,
}
GGUF = {
    f"GGUF {kind.name}": kind for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
}
