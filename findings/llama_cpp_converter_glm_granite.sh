#!/usr/bin/env bash
# llama.cpp's converter, as llama-cpp-python 0.3.36 has it in its source: two families whose GGUF files say something else than
# config.json.
# - GLM-4 as transformers has it (GlmForCausalLM): the epsilon of the norms is 1e-5 whatever `rms_norm_eps` is. The makers' is
#   1.5625e-7. The converter looks for `layernorm_epsilon`, a name of the format before.
# - Granite 4 without states (GraniteMoeHybridForCausalLM with attention in all layers): the file is of the architecture `granite`
#   or `granitemoe`, and has the sizes of a Mamba's states all the same. A reader that refuses what it does not know refuses it.
#
# Seen on 2026-11-29 with llama-cpp-python 0.3.36, transformers 5.23.0 and torch 2.13.0: an epsilon of 1e-05, and five keys
# `granitemoe.ssm.*`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" 2>/dev/null; }
pip install torch==2.13.0 transformers==5.23.0 sentencepiece scikit-build-core pyproject_metadata pathspec packaging
(cd "$folder" && pip download --no-deps --no-build-isolation --no-binary :all: llama-cpp-python==0.3.36)
tar xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
cat > "$folder/try.py" <<'PY'
import json
import logging
import sys
from pathlib import Path

base = Path(sys.argv[1])
source = base / "llama_cpp_python-0.3.36/vendor/llama.cpp"
sys.path[:0] = [str(source / "gguf-py"), str(source)]
logging.disable(logging.WARNING)
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from transformers import GlmConfig, GlmForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def fields(name, model):
    """What the converter says of a model."""
    folder, file = base / name, base / f"{name}.gguf"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if "layer_types" in config:  # the makers' files have the shorter name
        config["layer_types"] = ["attention"] * len(config["layer_types"])
        (folder / "config.json").write_text(json.dumps(config))
    found = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))

    class Converted(found):
        model_arch = found.model_arch

        def set_vocab(self):
            """A vocabulary changes nothing here."""

    Converted(folder, gguf.LlamaFileType.ALL_F32, file, eager=True, model_name=name).write()
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


glm = fields("glm", GlmForCausalLM(GlmConfig(**SIZES, head_dim=16, rms_norm_eps=1.5625e-7)))
epsilon = glm["chatglm.attention.layer_norm_rms_epsilon"]
print(f"GLM: rms_norm_eps 1.5625e-07, in the file {epsilon:.4g}")
granite = fields(
    "granite",
    GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **SIZES,
            shared_intermediate_size=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention"] * 2,
            mamba_n_heads=8,
            mamba_d_head=16,
        )
    ),
)
states = sorted(key for key in granite if ".ssm." in key)
print(f"Granite: {granite['general.architecture']} with {states}")
if not (abs(epsilon - 1e-5) < 1e-9 and granite["general.architecture"] == "granitemoe" and len(states) == 5):
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" -W ignore "$folder/try.py" "$folder" 2>/dev/null
