"""Held-out exact match of base and adapters: `python -m personae.evals.demo.measure`.

A backend is any function from samples to the model's texts, so another engine is one function.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from personae.evals.demo import data
from personae.evals.demo.grading import Scores, grade, held_out
from personae.evals.demo.sample import END_OF_TURN, Sample

HERE = Path(__file__).parent
MODEL, ADAPTERS = HERE / "model", HERE / "adapters"
Generate = Callable[[Sequence[Sample]], list[str]]


def through_transformers(adapter: Path | None = None, batch: int = 64, limit: int = 192) -> Generate:
    """Greedy decoding with plain transformers, and PEFT where an adapter is given; no grammar."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()

    def generate(samples: Sequence[Sample]) -> list[str]:
        answers = [""] * len(samples)
        order = sorted(range(len(samples)), key=lambda index: len(samples[index].prompt))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            prompts = [samples[row].prompt for row in rows]
            inputs = tokenizer(
                prompts,
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
                return_token_type_ids=False,
            )
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
            for row, ids in zip(rows, output[:, inputs["input_ids"].shape[1] :], strict=True):
                answers[row] = tokenizer.decode(ids).partition(END_OF_TURN)[0]
        return answers

    return generate


def measure(generate: Generate, task: str, count: int) -> Scores:
    """Mean grades of a task's held-out samples."""
    samples = held_out(task, count)
    grades = [grade(sample, text) for sample, text in zip(samples, generate(samples), strict=True)]
    return {name: sum(one[name] for one in grades) / count for name in grades[0]}


def main() -> None:
    """Measures the named models, adds their figures to the existing ones, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=("base", *data.ADAPTER_TASKS), help="measure these models instead of all"
    )
    parser.add_argument("--count", type=int, default=64, help="held-out samples a task")
    parser.add_argument("--output", type=Path, default=HERE / "figures.json")
    options = parser.parse_args()
    figures: dict[str, dict[str, Scores]] = {}
    if options.only and options.output.exists():
        figures = json.loads(options.output.read_text())
    for model in options.only or ("base", *data.ADAPTER_TASKS):
        generate = through_transformers(None if model == "base" else ADAPTERS / model)
        for task in data.TASKS | data.ADAPTER_TASKS if model == "base" else (model,):
            figures.setdefault(task, {})[model] = measure(generate, task, options.count)
            options.output.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("task", "model", "figures in %", title="Held-out, greedy, transformers, without grammar")
    for task, models in figures.items():
        for model, scores in models.items():
            shown = "  ".join(f"{name} {100 * score:.1f}" for name, score in scores.items())
            table.add_row(task, model, shown)
    Console().print(table)


if __name__ == "__main__":
    main()
