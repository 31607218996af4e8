"""The data of the task files in this folder: held-out conversations of the demo."""

from typing import Any

from datasets import Dataset

from personae.evals.demo.grading import held_out

COUNT = 64


def which_tool(**_: Any) -> dict[str, Dataset]:
    """Conversations that offer several tools, and how a call of each would begin."""
    rows = []
    for sample in held_out("tool", 2 * COUNT):
        names = [tool["function"]["name"] for tool in sample.tools or ()]
        choices = [f'<tool_call>\n{{"name": "{name}", "' for name in names]
        right = [place for place, choice in enumerate(choices) if sample.answer.startswith(choice)]
        if len(choices) > 1 and not sample.thinking:
            rows.append({"prompt": sample.prompt, "choices": choices, "answer": right[0]})
    return {"test": Dataset.from_list(rows[:COUNT])}


def result(**_: Any) -> dict[str, Dataset]:
    """Conversations that end with a tool's result."""
    samples = [sample for sample in held_out("result", COUNT) if not sample.thinking]
    return {"test": Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in samples])}


def extract(**_: Any) -> dict[str, Dataset]:
    """A schema and a paragraph."""
    samples = [sample for sample in held_out("extract", COUNT) if not sample.thinking]
    rows = [{"question": one.messages[0]["content"], "answer": one.answer} for one in samples]
    return {"test": Dataset.from_list(rows)}


def same(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer is right, word for word."""
    return {"exact": float(results[0].strip() == doc["answer"])}
