#!/usr/bin/env bash
# transformers 5.23.0: the config that it makes of a Qwen3-MoE file in GGUF does not read `expert_feed_forward_length`.
# Experts get 768 inner numbers, the class' default, whatever the file says: right for 30B-A3B, but not for 235B-A22B,
# which has 1,536. `expert_count`, `expert_used_count` and the normalized weights (which no key says) are right.
#
# Seen on 2026-11-28 with transformers 5.23.0, gguf 0.19.0 and torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 gguf==0.19.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys
import tempfile

import gguf
import numpy as np
from transformers import AutoConfig

with tempfile.TemporaryDirectory() as place:
    writer = gguf.GGUFWriter(f"{place}/model.gguf", "qwen3moe")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges([])
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = AutoConfig.from_pretrained(place, gguf_file="model.gguf")
print(f"experts: {config.num_experts}, {config.num_experts_per_tok} for each token")
print(f"moe_intermediate_size: {config.moe_intermediate_size} (the file says 32)")
print(f"norm_topk_prob: {config.norm_topk_prob}")
if (config.num_experts, config.moe_intermediate_size, config.norm_topk_prob) != (8, 768, True):
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
