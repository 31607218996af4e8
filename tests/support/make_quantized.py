"""Makes the tiny quantized checkpoints of tests/data/checkpoints.tar.xz, each with the tool that people use.

    tar -xf tests/data/checkpoints.tar.xz -C OUT
    PYTHON make_quantized.py OUT [NAME...]
    tar --sort=name --owner=0 --group=0 --mtime=@0 -C OUT -c . | xz -9e > tests/data/checkpoints.tar.xz

PYTHON has the product's packages and the tools below; it runs on a CPU, a few seconds to a minute for each.
`expected.json` beside each checkpoint has the SHA-256 of every matrix as the tool itself dequantizes it: of
float32 values, with float32 copies of the file's scales, or of bfloat16 where the tool has nothing else.

    pip install --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.20.0 gptqmodel==7.7.0 autoawq==0.2.9
        auto-round==0.16.1 bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 optimum==2.3.0 loguru einops termcolor
        py-cpuinfo nvidia-ml-py logbar device-smi tokenicer pypcre defuser omegaconf pulp scipy
        torchao==0.18.0 antlr4-python3-runtime==4.9.3 zstandard datasets
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", TQDM_DISABLE="1", GPTQMODEL_CPU_WORKERS="2", TOKENIZERS_PARALLELISM="false"
)
warnings.filterwarnings("ignore")

import torch  # noqa: E402  # the tools read these variables when they are imported
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torchao_weights import plain_weight  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 256,
}
MODULES = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
Dequantize = Callable[[str], Tensor]


def base(work: Path, dtype: torch.dtype, kind: str = "llama") -> Path:
    """A random model. Every third output of k is positive, so that its zero point is 0 where it has one."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = work / f"{kind}-{dtype}".replace("torch.", "")
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    else:
        experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**SHAPE, **experts, decoder_sparse_step=1, mlp_only_layers=[])
        )
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape)
            p.copy_(drawn * 0.08 + 0.02 * torch.randn((*p.shape[:-1], 1)) if p.ndim > 1 else 1 + 0.1 * drawn)
            if "k_proj" in name:
                p[::3] = p[::3].abs() + 0.01
    model.to(dtype).save_pretrained(folder)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters | {"<|end|>": 256}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    end = dict.fromkeys(("eos_token", "pad_token", "bos_token"), "<|end|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end).save_pretrained(folder)
    return folder


def texts(count: int) -> list[str]:
    """Random letters, to calibrate with."""
    torch.manual_seed(1)
    return ["".join(chr(97 + int(x)) for x in torch.randint(0, 26, (64,))) for _ in range(count)]


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def of_module(stored: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """A module's tensors by their suffixes."""
    return {key[len(name) + 1 :]: t for key, t in stored.items() if key.startswith(f"{name}.")}


def llmcompressor(
    work: Path, out: Path, recipe: Callable[[], Any], *, data: bool = False, kind: str = "llama"
) -> Dequantize:
    """llm-compressor: rounding to nearest, or GPTQ with `data` to calibrate."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base(work, torch.bfloat16, kind), dtype="auto")
    rows = {"input_ids": torch.randint(0, 256, (8, 64)).tolist(), "attention_mask": [[1] * 64] * 8}
    given = {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": 8,
        "max_seq_length": 64,
        "shuffle_calibration_samples": False,
    }
    oneshot(model=model, recipe=recipe(), **(given if data else {}))
    model.save_pretrained(out, save_compressed=True)
    return compressed_tensors(out)


def compressed_tensors(out: Path) -> Dequantize:
    """What compressed-tensors decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    stored = tensors(out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = list(config["config_groups"].values())

    def dequantize(name: str) -> Tensor:
        own = of_module(stored, name)
        if "weight_scale" not in own:
            return own["weight"]
        group = groups[1 if len(groups) > 1 and "mlp" in name else 0]
        tool = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
        wide = {
            k: t.float() if k == "weight_scale" and t.dtype in (torch.bfloat16, torch.float16) else t
            for k, t in own.items()
        }
        weight: Tensor = tool.decompress(wide, QuantizationScheme.model_validate(group))["weight"]
        return weight

    return dequantize


def recipe(
    scheme: str | None = None,
    *,
    ignore: tuple[str, ...] = ("lm_head",),
    modifier: str = "QuantizationModifier",
    **weights: Any,
) -> Any:
    """A scheme by its name, or one group of `weights`."""
    from llmcompressor.modifiers import quantization

    made = getattr(quantization, modifier)
    if scheme is not None:
        return made(targets="Linear", scheme=scheme, ignore=list(ignore), **weights)
    own = {"type": "int", "dynamic": False, "symmetric": True, "strategy": "group", **weights}
    return made(config_groups={"group_0": {"targets": ["Linear"], "weights": own}}, ignore=list(ignore))


def mixed() -> Any:
    """FP8 for attention and four bits for the MLPs."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    eight = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    four = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group",
        "group_size": 32,
    }
    token = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    groups = {
        "attention": {
            "targets": ["re:.*self_attn.(q|k|v|o)_proj$"],
            "weights": eight,
            "input_activations": token,
        },
        "mlp": {"targets": ["re:.*mlp.*"], "weights": four},
    }
    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


def gptqmodel(work: Path, out: Path, **config: Any) -> Dequantize:
    """GPTQModel."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(base(work, torch.float16)), QuantizeConfig(**config), device="cpu")
    model.quantize(texts(16), batch_size=1)
    model.save(str(out))
    return gptq_modules(out, BACKEND.TORCH)


def gptq_modules(out: Path, backend: Any) -> Dequantize:
    """What GPTQModel's own modules have, with scales in float32."""
    from gptqmodel import GPTQModel

    loaded = GPTQModel.load(str(out), device="cpu", backend=backend).model
    stored = tensors(out)

    def dequantize(name: str) -> Tensor:
        module = loaded.get_submodule(name)
        scales = stored[f"{name}.scales"].float()
        module.scales = (
            torch.nn.Parameter(scales, False) if isinstance(module.scales, torch.nn.Parameter) else scales
        )
        if hasattr(module, "dequantize_weight"):
            return module.dequantize_weight().float().T
        module = module.float()
        with torch.no_grad():
            weight: Tensor = module(torch.eye(module.in_features)) - module(
                torch.zeros(1, module.in_features)
            )
        return weight.T

    return dequantize


def autoawq(work: Path, out: Path) -> Dequantize:
    """AutoAWQ, which is no longer maintained."""
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoTokenizer

    source = base(work, torch.float16)
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", safetensors=True)
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        AutoTokenizer.from_pretrained(source),
        quant_config=config,
        calib_data=texts(64),
        max_calib_seq_len=64,
        n_parallel_calib_samples=1,
        apply_clip=False,  # needs 64 outputs or more
    )
    model.save_quantized(str(out))
    stored = tensors(out)

    def dequantize(name: str) -> Tensor:
        own = of_module(stored, name)
        weight: Tensor = dequantize_gemm(own["qweight"], own["qzeros"], own["scales"].float(), 4, 32)
        return weight.T.float()

    return dequantize


def bitsandbytes(work: Path, out: Path, **config: Any) -> Dequantize:
    """bitsandbytes, through transformers. A forward pass on a CPU would rewrite the weights."""
    import bitsandbytes.functional as functional
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        base(work, torch.bfloat16),
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(**config),
        device_map="cpu",
    )
    model.save_pretrained(out)

    def dequantize(name: str) -> Tensor:
        weight = model.get_submodule(name).weight
        if "load_in_8bit" in config:
            stored = tensors(out)
            return functional.int8_vectorwise_dequant(stored[f"{name}.weight"], stored[f"{name}.SCB"]).float()
        found: Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
        return found  # in bfloat16

    return dequantize


def block_fp8(work: Path, out: Path, size: int, scale_format: str) -> Dequantize:
    """Block FP8 by transformers' own operation."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    source, blocks = base(work, torch.bfloat16), [size, size]
    config = FineGrainedFP8Config(weight_block_size=blocks, scale_fmt=scale_format)
    tool, stored = Fp8Quantize(SimpleNamespace(quantization_config=config)), {}
    for name, weight in tensors(source).items():
        stored |= tool.convert({name: weight}) if ".layers." in name and weight.ndim == 2 else {name: weight}
    out.mkdir(parents=True)
    save_file({k: t.contiguous() for k, t in stored.items()}, out / "model.safetensors", {"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": blocks}
    fields["quantization_config"] = how | ({} if scale_format == "float" else {"scale_fmt": scale_format})
    (out / "config.json").write_text(json.dumps(fields))

    def dequantize(name: str) -> Tensor:
        weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"]
        found: Tensor = Fp8Dequantize(None)._dequantize_one(weight, scale.float(), torch.float32)
        return found

    return dequantize


def autoround(work: Path, out: Path, form: str, **config: Any) -> Dequantize:
    """AutoRound without tuning, in its own format or another tool's."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    source = base(work, torch.float16)
    row = {"attention_mask": torch.ones(64, dtype=torch.long)}
    data = torch.utils.data.DataLoader(
        [{"input_ids": torch.randint(0, 256, (64,)), **row} for _ in range(8)], batch_size=1
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tool = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(source),
        iters=0,
        device_map="cpu",
        nsamples=8,
        seqlen=64,
        dataset=data,
        **config,
    )
    tool.quantize_and_save(str(work / "made"), format=form)
    shutil.copytree(next((work / "made").rglob("config.json")).parent, out)
    if config["scheme"] == "MXFP4":
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme

        stored, packed = tensors(out), BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
        return lambda name: packed.decompress(
            of_module(stored, name), preset_name_to_scheme("MXFP4A16", ["Linear"])
        )["weight"]
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    stored = tensors(out)

    def dequantize(name: str) -> Tensor:
        own = of_module(stored, name)
        inputs, outputs = own["qweight"].shape[0] * 8, own["qweight"].shape[1]
        module = QuantLinear(4, config["group_size"], inputs, outputs, False, weight_dtype=torch.float16)
        for key in ("qweight", "qzeros"):
            setattr(module, key, own[key])
        module.scales = own["scales"].float()
        module = module.float()
        with torch.no_grad():
            weight: Tensor = module(torch.eye(inputs)) - module(torch.zeros(1, inputs))
        return weight.T

    return dequantize


def modelopt(work: Path, out: Path, scheme: str) -> Dequantize:
    """NVIDIA ModelOpt."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base(work, torch.bfloat16), dtype=torch.bfloat16)
    ids = torch.randint(0, 256, (4, 32))
    model = mtq.quantize(model, getattr(mtq, scheme), lambda model: model(ids))
    export_hf_checkpoint(model, export_dir=str(out))
    stored = tensors(out)

    def dequantize(name: str) -> Tensor:
        values, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        own = FP8QTensor(values.shape, torch.float32, values)
        weight: Tensor = own.dequantize(scale=scale, block_sizes={})
        return weight

    return dequantize


def torchao(work: Path, out: Path, config: Callable[[], Any]) -> Dequantize:
    """torchao, through transformers."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    model = AutoModelForCausalLM.from_pretrained(
        base(work, torch.bfloat16),
        dtype=torch.bfloat16,
        quantization_config=TorchAoConfig(config()),
        device_map="cpu",
    )
    model.save_pretrained(out)

    return lambda name: plain_weight(model.get_submodule(name).weight)


def torchao_int4(**options: Any) -> Any:
    """Four bits in groups, each level in a byte."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), **options)


def torchao_asymmetric() -> Any:
    """The same with zero points."""
    from torchao.quantization import MappingType

    return torchao_int4(mapping_type=MappingType.ASYMMETRIC)


def torchao_int8() -> Any:
    """A scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(version=2)


def torchao_fp8() -> Any:
    """The same in FP8."""
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


MADE: dict[str, Callable[[Path, Path], Dequantize]] = {
    "ct-w4a16": partial(llmcompressor, recipe=partial(recipe, num_bits=4, group_size=32)),
    "ct-w4a16-asym": partial(
        llmcompressor, recipe=partial(recipe, num_bits=4, group_size=32, symmetric=False)
    ),
    "ct-w4-channel": partial(llmcompressor, recipe=partial(recipe, num_bits=4, strategy="channel")),
    "ct-w3": partial(llmcompressor, recipe=partial(recipe, num_bits=3, group_size=32)),
    "ct-w8-channel": partial(llmcompressor, recipe=partial(recipe, num_bits=8, strategy="channel")),
    "ct-w8a8": partial(llmcompressor, recipe=partial(recipe, "W8A8")),
    "ct-fp8-dynamic": partial(llmcompressor, recipe=partial(recipe, "FP8_DYNAMIC")),
    "ct-fp8-kv": partial(
        llmcompressor,
        recipe=lambda: recipe(
            "FP8",
            kv_cache_scheme={
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
        ),
        data=True,
    ),
    "ct-fp8-block": partial(llmcompressor, recipe=partial(recipe, "FP8_BLOCK")),
    "ct-mxfp4": partial(llmcompressor, recipe=partial(recipe, "MXFP4A16")),
    "ct-mxfp8": partial(llmcompressor, recipe=partial(recipe, "MXFP8")),
    "ct-nvfp4": partial(llmcompressor, recipe=partial(recipe, "NVFP4A16")),
    "ct-mixed": partial(llmcompressor, recipe=mixed),
    "ct-gptq-static": partial(
        llmcompressor,
        recipe=partial(recipe, modifier="GPTQModifier", num_bits=4, group_size=32, actorder="static"),
        data=True,
    ),
    "ct-moe-w4a16": partial(
        llmcompressor,
        recipe=partial(recipe, num_bits=4, group_size=32, ignore=("lm_head", "re:.*mlp.gate$")),
        kind="qwen3_moe",
    ),
    "gptq-sym": partial(gptqmodel, bits=4, group_size=32, sym=True, desc_act=False),
    "gptq-asym": partial(gptqmodel, bits=4, group_size=32, sym=False, desc_act=False),
    "gptq-act": partial(gptqmodel, bits=4, group_size=32, sym=True, desc_act=True),
    "gptq-8bit": partial(gptqmodel, bits=8, group_size=32, sym=True, desc_act=False),
    "gptq-3bit": partial(gptqmodel, bits=3, group_size=32, sym=True, desc_act=False),
    "gptq-2bit": partial(gptqmodel, bits=2, group_size=32, sym=True, desc_act=False),
    "gptq-channel": partial(
        gptqmodel, bits=4, group_size=-1, sym=True, desc_act=False, act_group_aware=False
    ),
    "gptq-v2": partial(gptqmodel, bits=4, group_size=32, sym=False, desc_act=False, format="gptq_v2"),
    "autoawq": autoawq,
    "bnb-nf4": partial(bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-nf4-double": partial(
        bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bnb-fp4": partial(bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": partial(bitsandbytes, load_in_8bit=True),
    "fp8-block": partial(block_fp8, size=32, scale_format="float"),
    "fp8-block-ue8m0": partial(block_fp8, size=32, scale_format="ue8m0"),
    "autoround": partial(autoround, form="auto_round", scheme="W4A16", group_size=32),
    "autoround-gptq": partial(autoround, form="auto_gptq", scheme="W4A16", group_size=32, sym=False),
    "autoround-mxfp4": partial(autoround, form="auto_round", scheme="MXFP4"),
    "modelopt-fp8": partial(modelopt, scheme="FP8_DEFAULT_CFG"),
    "torchao-int8": partial(torchao, config=torchao_int8),
    "torchao-int4": partial(torchao, config=torchao_int4),
    "torchao-int4-asym": partial(torchao, config=torchao_asymmetric),
    "torchao-fp8": partial(torchao, config=torchao_fp8),
}


def modules(folder: Path) -> Iterator[str]:
    """The names of the matrices in the layers."""
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if "moe" not in folder.name:
            yield from (f"{prefix}.{name}" for name in MODULES)
            continue
        yield from (f"{prefix}.{name}" for name in MODULES if "mlp" not in name)
        for expert in range(3):
            yield from (f"{prefix}.mlp.experts.{expert}.{name}_proj" for name in ("gate", "up", "down"))


def make(out: Path, name: str) -> None:
    """Makes one checkpoint, with `expected.json`."""
    folder = out / name
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / name
        dequantize = MADE[name](Path(work), made)
        hashes = {}
        for module in modules(made):
            weight = dequantize(module).detach().contiguous() + 0.0  # no minus zeros
            raw = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight.float()
            of = "bfloat16" if weight.dtype is torch.bfloat16 else "float32"
            hashes[module] = f"{of} {list(weight.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(made / file, folder / file)
        (folder / "expected.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    target, names = Path(sys.argv[1]), sys.argv[2:]
    if len(names) == 1:
        make(target, names[0])
    else:  # a process each, because the tools change each other
        for name in names or MADE:
            again = [sys.executable, __file__, str(target), name]
            done = subprocess.run(again, capture_output=True, text=True)  # this script
            print(name, "made" if done.returncode == 0 else done.stderr[-1500:], flush=True)
