#!/usr/bin/env bash
# transformers 5.23.0: Nemotron-H limits a Mamba step from below by `time_step_min` when it computes several tokens at once, and
# not at all when it computes one token after a cache. `time_step_limit`, which the config also has, is used in neither. So where
# a step is shorter than `time_step_min` (0.001), an answer with the cache differs from the same text computed at once.
#
# Seen on 2026-11-28 with transformers 5.23.0 and torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
config = NemotronHConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    layers_block_type=["linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    intermediate_size=64,
)
print(f"time_step_min: {config.time_step_min}, time_step_limit: {getattr(config, 'time_step_limit', None)}")
model = NemotronHForCausalLM(config).eval()
ids = torch.randint(64, (1, 12))


@torch.no_grad()
def difference() -> float:
    """Of the last token's logits, computed at once and after 11 tokens from the cache, relative to the largest."""
    whole = model(ids).logits[0, -1]
    cache = model(ids[:, :8], use_cache=True).past_key_values
    for place in range(8, 12):
        out = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
    return float((out.logits[0, -1] - whole).abs().max() / whole.abs().max())


found = []
for bias in (0.0, -9.0):  # softplus(0) is 0.69, softplus(-9) is 0.00012: a shorter step than time_step_min
    mixer = model.model.layers[0].mixer
    torch.nn.init.constant_(mixer.dt_bias, bias)
    torch.nn.init.zeros_(mixer.D)
    torch.nn.init.normal_(mixer.in_proj.weight)
    torch.nn.init.zeros_(mixer.in_proj.weight[-config.mamba_num_heads :])  # the step is the bias alone
    torch.nn.init.normal_(mixer.out_proj.weight)
    found.append(difference())
    print(f"dt_bias {bias}: the last logits differ by {found[-1]:.1e}")
if not (found[0] < 1e-4 and found[1] > 1e-3):
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
