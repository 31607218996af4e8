#!/usr/bin/env bash
# transformers 5.23.0: `from_pretrained` of a Youtu model loads the embedding and then sets the padding token's row to
# zero, whatever the checkpoint has there. Llama, Qwen 3, Mistral, DeepSeek V3 and Gemma 2 keep the row. Youtu's own
# `_init_weights` zeroes a slice of `weight.data`, and the guard that spares weights which were loaded sees only whole
# tensors. A prompt with that token has other logits than in an implementation that uses the checkpoint as it is.
#
# Seen on 2026-11-28 with transformers 5.23.0 and torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pad_token_id": 3, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 16,
}
seen = {}
for kind in ("youtu", "llama", "qwen3", "mistral", "deepseek_v3", "gemma2"):
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    with torch.no_grad():
        made.get_input_embeddings().weight.normal_()
    with tempfile.TemporaryDirectory() as saved:
        made.save_pretrained(saved)
        loaded = AutoModelForCausalLM.from_pretrained(saved)
    before, after = (model.get_input_embeddings().weight for model in (made, loaded))
    seen[kind] = "kept" if torch.equal(before[3], after[3]) else "zero" if not after[3].any() else "changed"
    print(f"{kind}: the padding token's row is {seen[kind]}; the others are equal: {torch.equal(before[4:], after[4:])}")
if seen.pop("youtu") != "zero" or {*seen.values()} != {"kept"}:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
