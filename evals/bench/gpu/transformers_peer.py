"""Tokens per second of Transformers with PEFT on the same model.

    python -m personae.evals.bench.gpu.transformers_peer MODEL ADAPTERS OUT.json
        [--seconds 45] [--tokens 32] [--prompt 512]

Greedy answers of one length to random prompts of one length: the base, one adapter for all rows, and all
adapters mixed (PEFT's `adapter_names`). OUT is written after each load; none begins after the seconds.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS = (1, 16, 64)


def measure(model: Any, rows: int, prompt: int, tokens: int, **more: Any) -> dict[str, float]:
    """Seconds to the first token and in all, and tokens per second of the whole and of decoding."""
    ids = torch.randint(5, 1000, (rows, prompt), device=model.device)

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
                **more,
            )
            _synchronize()
        return time.perf_counter() - begun

    seconds(2)  # compiles and allocates
    first, whole = seconds(1), seconds(tokens)
    return {
        "first s": first,
        "whole s": whole,
        "tokens/s": rows * tokens / whole,
        "decode tokens/s": rows * (tokens - 1) / max(whole - first, 1e-9),
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m personae.evals.bench.gpu.transformers_peer")
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    options = parser.parse_args()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    base = base.to(device).eval()
    names = sorted(path.name for path in options.adapters.iterdir())
    found: list[dict[str, Any]] = []

    def loads(what: str, model: Any, mixed: Callable[[int], dict[str, Any]]) -> None:
        for rows in ROWS:
            if time.perf_counter() - begun < options.seconds:
                figures = measure(model, rows, options.prompt, options.tokens, **mixed(rows))
                found.append({"adapters": what, "rows": rows, **figures})
                print(found[-1], flush=True)
                options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")

    loads("none", base, lambda _: {})
    tuned = PeftModel.from_pretrained(base, options.adapters / names[0], adapter_name=names[0])
    for name in names[1:]:
        tuned.load_adapter(options.adapters / name, adapter_name=name)
    tuned.eval()
    loads("one", tuned, lambda _: {})
    loads("mixed", tuned, lambda rows: {"adapter_names": [names[row % len(names)] for row in range(rows)]})


if __name__ == "__main__":
    main()
