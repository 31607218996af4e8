"""Llama 3.2 (1B and 3B) and Llama 4: a Python list of calls.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/#-zero-shot-function-calling-
"""

from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.python_call import ARGUMENTS

FORMAT = ToolFormat(
    name="pythonic",
    signs=("[func_name1(",),
    trigger="[",
    open="[ ",
    before_name="",
    after_name="(",
    arguments=ARGUMENTS,
    after_arguments=" )",
    between=" , ",
    close=" ]",
    anywhere=False,
)
