"""Held-out exact match of base and adapters: `python -m personae.evals.demo.measure`.

A backend is any callable from samples to the texts that the model writes for them, so that another engine
is one function.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from personae.evals.demo import data
from personae.evals.demo.sample import END_OF_TURN, Sample, read_calls

HERE = Path(__file__).parent
MODEL, ADAPTERS = HERE / "model", HERE / "adapters"
Generate = Callable[[Sequence[Sample]], list[str]]
Scores = dict[str, float]


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


def _visible(text: str) -> str:
    """The text behind the thoughts."""
    return text.rpartition("</think>")[2].strip()


def grade(sample: Sample, text: str) -> Scores:
    """What is right about one answer; each figure is 0 or 1 and is averaged later.

    exact: the whole visible answer. For calls also tool (the right names, in order) and valid (they parse and
    satisfy the offered schema); for records valid alone; for requests that no tool fits,
    quiet (nothing is called).
    """
    said, gold = _visible(text), sample.answer
    scores = {"exact": float(said == gold)}
    calls, wanted = read_calls(said), read_calls(gold)
    if wanted:
        calls = calls or []
        names = [call["name"] for call in calls]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or []}
        scores["tool"] = float(names == [call["name"] for call in wanted])
        scores["valid"] = float(
            bool(calls) and all(_satisfies(call["arguments"], schemas.get(call["name"])) for call in calls)
        )
        scores["exact"] = float(calls == wanted)
    elif sample.task == "no_call":
        scores["quiet"] = float("<tool_call>" not in said)
    elif sample.schema or gold.startswith("{"):
        try:
            record = json.loads(said)
        except ValueError:
            return scores | {"valid": 0.0, "exact": 0.0}
        scores["exact"] = float(record == json.loads(gold))
        scores["valid"] = float(_satisfies(record, sample.schema or {}))
    return scores


def _satisfies(instance: Any, schema: dict[str, Any] | None) -> bool:
    return schema is not None and bool(jsonschema.Draft202012Validator(schema).is_valid(instance))


def held_out(task: str, count: int) -> list[Sample]:
    """The samples that a task is measured on."""
    return list(
        itertools.islice(data.samples((data.TASKS | data.ADAPTER_TASKS)[task], "test", "measure"), count)
    )


def measure(generate: Generate, task: str, count: int) -> Scores:
    """Mean grades of a task's held-out samples."""
    samples = held_out(task, count)
    grades = [grade(sample, text) for sample, text in zip(samples, generate(samples), strict=True)]
    return {name: sum(one[name] for one in grades) / count for name in grades[0]}


def main() -> None:
    """Measures the named models, adds their figures to those that are there, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=("base", *data.ADAPTER_TASKS), help="default: all")
    parser.add_argument("--count", type=int, default=64, help="held-out samples a task")
    parser.add_argument("--output", type=Path, default=HERE / "figures.json")
    options = parser.parse_args()
    figures: dict[str, dict[str, Scores]] = {}
    if options.models and options.output.exists():
        figures = json.loads(options.output.read_text())
    for model in options.models or ("base", *data.ADAPTER_TASKS):
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
