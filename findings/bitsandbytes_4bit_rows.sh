#!/usr/bin/env bash
# bitsandbytes 0.50.2: on a CPU `dequantize_4bit` is wrong for a matrix whose rows are no multiple of the block size.
# `quantize_4bit` makes blocks of the flat matrix, so a block may go on in the next row. The dequantization begins a new
# block with each row. It returns no error, and `Linear4bit` multiplies by what it returns. With rows of 96 or 160
# numbers and blocks of 64 the largest error is four to five times that of the quantization itself.
#
# Seen on 2026-11-30 with bitsandbytes 0.50.2 and torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check bitsandbytes==0.50.2 2>/dev/null
cat > "$folder/try.py" <<'PY'
import sys

import bitsandbytes.functional as bnb
import torch

torch.manual_seed(0)
wrong = {}
for width in (64, 96, 128, 160, 192):
    weight = torch.randn(32, width)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), 1).flatten().long()
    plain = (state.code[codes] * state.absmax.repeat_interleave(64)).view_as(weight)
    theirs = bnb.dequantize_4bit(packed, state)
    ours, found = ((each - weight).abs().max().item() for each in (plain, theirs))
    wrong[width] = not torch.equal(plain, theirs)
    print(f"rows of {width}: largest error {found:.2f}, by the blocks of the flat matrix {ours:.2f}")
if [width for width, differs in wrong.items() if differs] != [96, 160]:
    sys.exit("this has changed")
print("as described")
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
