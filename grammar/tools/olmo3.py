"""Olmo 3: one Python call per line.

https://huggingface.co/allenai/Olmo-3-7B-Instruct
"""

from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.python_call import ARGUMENTS

FORMAT = ToolFormat(
    name="olmo3",
    signs=("<function_calls>",),
    trigger="<function_calls>",
    open="<function_calls> ",
    before_name="",
    after_name="(",
    arguments=ARGUMENTS,
    after_arguments=" )",
    between=" ",
    close=" </function_calls>",
)
