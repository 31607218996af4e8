"""LFM2: a Python list of calls between tags.

https://huggingface.co/LiquidAI/LFM2-1.2B
"""

from personae.grammar.tools.format import ToolFormat
from personae.grammar.tools.python_call import ARGUMENTS

FORMAT = ToolFormat(
    name="lfm2",
    signs=("<|tool_call_start|>",),
    trigger="<|tool_call_start|>",
    open="<|tool_call_start|> [ ",
    before_name="",
    after_name="(",
    arguments=ARGUMENTS,
    after_arguments=" )",
    between=" , ",
    close=" ] <|tool_call_end|>",
)
