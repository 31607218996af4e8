#!/usr/bin/env bash
# PEFT 0.21.2: `add_weighted_adapter(..., combination_type="cat")` is meant to give the weighted sum of the updates.
# If the first of the adapters has rsLoRA, the update is too large. The new config is copied from the first
# adapter, so the sum is scaled by alpha / sqrt(rank) of the new rank, although alpha was set to that rank: the factor
# is sqrt(sum of the ranks), 2.83 for two adapters of rank 4. With the other adapter first it is right.
#
# Seen on 2026-11-28 with PEFT 0.21.2, transformers 5.23.0 and torch 2.13.0 on a CPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model

warnings.simplefilter("ignore")


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.linear(x)


def factor(order):
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["linear"], "init_lora_weights": False}
    model = get_peft_model(Base(), LoraConfig(**config, use_rslora=True), adapter_name="rs")
    model.add_adapter("plain", LoraConfig(**config))
    layer = model.base_model.model.linear
    wanted = layer.get_delta_weight("rs") + layer.get_delta_weight("plain")
    model.add_weighted_adapter(order, [1.0, 1.0], "both", combination_type="cat")
    return float((layer.get_delta_weight("both") * wanted).sum() / (wanted * wanted).sum())


first, second = factor(["rs", "plain"]), factor(["plain", "rs"])
print(f"update of the sum / sum of the updates: rsLoRA first {first:.4f}, rsLoRA second {second:.4f}")
if abs(first - 8**0.5) > 1e-3 or abs(second - 1) > 1e-3:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py"
