"""Task (b): use a tool's result in the answer."""

from typing import Any

from personae.evals.demo.sample import Sample, dumps
from personae.evals.demo.tasks.fields import Field, draw_fields
from personae.evals.demo.tasks.tools import draw_action
from personae.evals.demo.values import Values, text_of

QUESTIONS = (
    "What is the {p} of the {noun}?",
    "Tell me the {p} of the {noun}",
    "Please get the {p} of the {noun}.",
    "I want to know the {p} of the {noun}.",
)


def question(values: Values) -> tuple[Sample, Field]:
    """The conversation up to the answer, and the field that was asked for."""
    rng = values.rng
    action = draw_action(values, verb=rng.choice(("get", "find", "check")))
    shown = [field for field in draw_fields(values, rng.choice((1, 2, 3))) if field.kind != "boolean"]
    while not shown:
        shown = [field for field in draw_fields(values, 3) if field.kind != "boolean"]
    asked = rng.choice(shown)
    failed = rng.random() < 0.15
    result = {"error": values.text()} if failed else {field.name: field.value for field in shown}
    answer = (
        f"That did not work: {result['error']}."
        if failed
        else f"The {asked.words} is {text_of(asked.value)}."
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice(QUESTIONS).format(p=asked.words, noun=action.noun)},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": action.call}]},
        {"role": "tool", "content": dumps(result)},
    ]
    sample = Sample(
        task="result",
        messages=messages,
        answer=answer,
        reasoning=f"Read {'error' if failed else asked.name}.",
        tools=[action.tool],
        thinking=rng.random() < 0.15,
    )
    return sample, asked


def answer_from_result(values: Values) -> Sample:
    """Say the asked field of a tool's result, or report its error."""
    return question(values)[0]
