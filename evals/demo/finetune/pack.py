"""Makes adapters small: the best of a rank, as far as it is less than theirs, in float8 (e4m3).

    python -m personae.evals.demo.finetune.pack runs evals/demo/smollm2 tools:12 extract:8

Each `scaling * B A` is divided anew between A and B, by its singular values, so that both have entries of one size.
With alpha 1 these are well inside the range of float8. Prints how far the packed product is from the one before, as a
share of it.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ALPHA = 1


def packed(a: Tensor, b: Tensor, scaling: float, rank: int) -> tuple[Tensor, Tensor]:
    """The halves in float8 of the rank-`rank` update that is closest to scaling * b @ a, for a scaling of
    `_ALPHA / rank`.

    a: [ranks, inputs], b: [outputs, ranks], both float; so are the results, with `rank` for `ranks`.
    """
    in_q, in_r = torch.linalg.qr(a.double().T)
    out_q, out_r = torch.linalg.qr(b.double())
    u, values, v = torch.linalg.svd(scaling * rank / _ALPHA * out_r @ in_r.T)
    root = values[:rank].sqrt()
    half_a, half_b = root[:, None] * (v[:rank] @ in_q.T), out_q @ u[:, :rank] * root
    return half_a.to(torch.float8_e4m3fn), half_b.to(torch.float8_e4m3fn)


def pack(source: Path, target: Path, rank: int) -> float:
    """Write the adapter in `source` to `target`, with at most `rank` ranks. Returns the distance of the updates
    as a share of them (Frobenius' norms over all modules)."""
    text = (source / CONFIG).read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    tensors = load_file(source / WEIGHTS)
    rank = min(rank, config["r"])
    scaling = config["lora_alpha"] / config["r"]
    made: dict[str, Tensor] = {}
    lost = whole = 0.0
    for name in [name for name in tensors if ".lora_A." in name]:
        other = name.replace(".lora_A.", ".lora_B.")
        a, b = tensors[name], tensors[other]
        made[name], made[other] = packed(a, b, scaling, rank)
        before = scaling * b.float() @ a.float()
        after = _ALPHA / rank * made[other].float() @ made[name].float()
        lost += float((after - before).square().sum())
        whole += float(before.square().sum())
    target.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: half.contiguous() for name, half in made.items()}, target / WEIGHTS, metadata={"format": "pt"}
    )
    for field, value in {"r": rank, "lora_alpha": _ALPHA}.items():
        text = re.sub(rf'("{field}": )[\d.]+', rf"\g<1>{value}", text)
    (target / CONFIG).write_text(text, encoding="utf-8")
    return float((lost / whole) ** 0.5)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a folder with a folder for each adapter")
    parser.add_argument("target", type=Path)
    parser.add_argument("adapters", nargs="+", metavar="NAME:RANK")
    given = parser.parse_args()
    for entry in given.adapters:
        name, _, rank = entry.partition(":")
        print(f"{name}: {pack(given.source / name, given.target / name, int(rank)):.4f}")


if __name__ == "__main__":
    main()
