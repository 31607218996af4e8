#!/usr/bin/env bash
# PEFT 0.21.2: LoRA on the experts of Llama 4 by `target_parameters` has A and B the other way round. Llama 4 and gpt-oss store an
# expert's matrix alike, as [inputs, outputs]. PEFT asks the module for `is_transposed`, which transformers sets for gpt-oss only.
# So A of gpt-oss has a column for each input, and A of Llama 4 one for each output: a reader must tell them apart by their sizes,
# and cannot where an expert has as many inputs as outputs.
#
# Seen on 2026-11-28 with peft 0.21.2, transformers 5.23.0 and torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

HIDDEN, INNER = 32, 24
sizes = dict(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
)
llama4 = Llama4ForCausalLM(Llama4TextConfig(**sizes, intermediate_size_mlp=INNER, interleave_moe_layer_step=1))
gpt_oss = GptOssForCausalLM(GptOssConfig(**sizes))
found = {}
for name, model, place in (("Llama 4", llama4, "feed_forward"), ("gpt-oss", gpt_oss, "mlp")):
    parameter = f"{place}.experts.down_proj"
    shape = dict(model.named_parameters())[f"model.layers.0.{parameter}"].shape
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=[parameter]))
    factors = {key.split(".")[-3]: tuple(value.shape) for key, value in adapted.named_parameters() if "lora_" in key}
    found[name] = tuple(shape), factors["lora_A"], factors["lora_B"]
    print(f"{name}: down_proj {tuple(shape)}, A {factors['lora_A']}, B {factors['lora_B']}")
alike = (2, INNER, HIDDEN)
if found != {"Llama 4": (alike, (8, HIDDEN), (INNER, 8)), "gpt-oss": (alike, (8, INNER), (HIDDEN, 8))}:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
