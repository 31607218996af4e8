"""Qwen3-Coder, Qwen3.5 and 3.6, Nemotron 3.

https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
"""

from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="qwen3_coder",
    signs=("<tool_call>", "<function=", "<parameter="),
    trigger="<tool_call>",
    before_name="<tool_call> <function=",
    after_name=">",
    arguments=KeyedArguments(
        before_key=" <parameter=", after_key=">\n", after_value="\n</parameter>", raw=True
    ),
    after_arguments=" </function> </tool_call>",
)
