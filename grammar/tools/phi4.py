"""Phi-4-mini.

https://huggingface.co/microsoft/Phi-4-mini-instruct
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="phi4",
    signs=("<|tool|>", "<|/tool|>"),
    trigger="functools[",
    open="functools[ ",
    before_name='{ "name" : "',
    after_name='" , "arguments" : ',
    after_arguments=" }",
    between=" , ",
    close=" ]",
)
