"""Gemma 4. Nested values are written as JSON.

https://ai.google.dev/gemma/docs/capabilities/function-calling
"""

from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="gemma4",
    signs=("<|tool_call>", "<tool_call|>"),
    trigger="<|tool_call>",
    before_name="<|tool_call>call:",
    after_name="{",
    arguments=KeyedArguments(
        before_key="",
        after_key=":",
        after_value="",
        between=",",
        quote='<|"|>',
        key=r"[^\s<>\"=:{}]+",
    ),
    after_arguments="}<tool_call|>",
    between="",
)
