"""gpt-oss: analysis is reasoning, commentary that is not a call is for the reader, final is the answer.

https://developers.openai.com/cookbook/articles/openai-harmony
"""

from personae.grammar.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(
    name="harmony",
    signs=("<|channel|>analysis<|message|>",),
    open="<|channel|>analysis<|message|>",
    close="<|end|>",
    joint="<|start|>assistant",
    aside="<|channel|>commentary<|message|>",
    text="<|channel|>final<|message|>",
    header=("<|channel|>", "<|message|>"),
)
