"""Makes a model in the shape of Llama 3.1 8B with random weights, and adapters for it, in seconds on a GPU.

    python -m personae.evals.bench.gpu.model FOLDER [--adapters 16] [--rank 16] [--adapters-only] [--tiny]

FOLDER gets `model` and `adapters`, with the bundled model's tokenizer. Tokens that it lacks get texts of
their own: otherwise answers would have no text, and bound ones a small vocabulary. `--tiny`: small shapes,
for a CPU. The folder has a file `whole` when all is there; then nothing is made.
"""

import argparse
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from personae.evals.bench.gpu.served import DEMO

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
}
WRITERS = 4  # threads that write files while the next tensors are made


class Maker:
    """Random weights of a shape, made on the GPU if there is one."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(self._device).manual_seed(1)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """[outputs, inputs] bfloat16 on the host, whose products are about as large as what they multiply."""
        made = torch.randn(
            outputs, inputs, generator=self._generator, device=self._device, dtype=torch.bfloat16
        )
        return made.mul_(inputs**-0.5).cpu()

    def modules(self) -> dict[str, tuple[int, int]]:
        """The linear modules of a layer: outputs and inputs."""
        hidden, inner = self.sizes["hidden_size"], self.sizes["intermediate_size"]
        heads, kv_heads = (
            self.sizes[f"num_{name}_heads"] * self.sizes["head_dim"] for name in ("attention", "key_value")
        )
        return {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def model(self, folder: Path) -> None:
        """Writes a model's folder."""
        hidden, vocabulary = self.sizes["hidden_size"], self.sizes["vocab_size"]
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder, vocabulary)
        (folder / "config.json").write_text(json.dumps(config_of(self.sizes)), encoding="utf-8")
        index: dict[str, str] = {}
        written: list[Future[None]] = []
        ones = torch.ones(hidden, dtype=torch.bfloat16)
        with ThreadPoolExecutor(WRITERS) as pool:

            def shard(name: str, tensors: dict[str, Tensor]) -> None:
                index.update(dict.fromkeys(tensors, name))
                written.append(pool.submit(save_file, tensors, folder / name, {"format": "pt"}))
                if len(written) > 2 * WRITERS:  # so that memory holds few layers
                    written[-2 * WRITERS].result()

            ends = {
                "model.embed_tokens.weight": self.weight(vocabulary, hidden) * hidden**0.5,
                "lm_head.weight": self.weight(vocabulary, hidden),
                "model.norm.weight": ones,
            }
            shard("model-ends.safetensors", ends)
            for layer in range(self.sizes["num_hidden_layers"]):
                prefix = f"model.layers.{layer}"
                tensors = {
                    f"{prefix}.{name}.weight": self.weight(*size) for name, size in self.modules().items()
                }
                for norm in ("input_layernorm", "post_attention_layernorm"):
                    tensors[f"{prefix}.{norm}.weight"] = ones.clone()  # files share no memory
                shard(f"model-{layer:02}.safetensors", tensors)
            for one in written:
                one.result()
        whole = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(whole, encoding="utf-8")

    def adapter(self, folder: Path, rank: int) -> None:
        """Writes an adapter of all linear modules."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer in range(self.sizes["num_hidden_layers"]):
            for name, (outputs, inputs) in self.modules().items():
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = self.weight(rank, inputs)
                tensors[f"{key}.lora_B.weight"] = self.weight(outputs, rank) * 0.1
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "random",
            "r": rank,
            "lora_alpha": rank,
            "bias": "none",
            "target_modules": [name.rpartition(".")[2] for name in self.modules()],
        }
        (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


def config_of(sizes: dict[str, int]) -> dict[str, Any]:
    """The fields of config.json."""
    end = json.loads((DEMO / "model" / "config.json").read_text(encoding="utf-8"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **{name: end[name] for name in ("bos_token_id", "eos_token_id") if name in end},
    }


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    text = json.loads((DEMO / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    known = {*text["model"]["vocab"].values(), *(token["id"] for token in text["added_tokens"])}
    text["model"]["vocab"] |= {f"\u0120w{id}": id for id in range(vocabulary) if id not in known}
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (DEMO / "model" / name).exists():
            shutil.copy(DEMO / "model" / name, folder / name)


def make(folder: Path, adapters: int, rank: int, sizes: dict[str, int], *, model: bool = True) -> None:
    """Makes everything that is not there yet. model: the model, too."""
    if (folder / "whole").exists():
        return
    maker = Maker(sizes)
    if model:
        maker.model(folder / "model")
    for number in range(adapters):
        maker.adapter(folder / "adapters" / f"a{number:02}", rank)
    (folder / "whole").touch()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m personae.evals.bench.gpu.model", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters-only", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes = TINY if options.tiny else LARGE
    make(options.folder, options.adapters, options.rank, sizes, model=not options.adapters_only)


if __name__ == "__main__":
    main()
