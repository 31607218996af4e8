"""FunctionGemma. Nested values are written as JSON.

https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="function_gemma",
    signs=("<start_function_call>",),
    trigger="<start_function_call>",
    before_name="<start_function_call>call:",
    after_name="{",
    arguments=KeyedArguments(
        before_key="",
        after_key=":",
        after_value="",
        between=",",
        quote="<escape>",
        key=r"[^\s<>\"=:{}]+",
    ),
    after_arguments="}<end_function_call>",
    between="",
)
