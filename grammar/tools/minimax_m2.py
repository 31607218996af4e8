"""MiniMax M2.

https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
"""

from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="minimax_m2",
    signs=("<minimax:tool_call>",),
    trigger="<minimax:tool_call>",
    open="<minimax:tool_call> ",
    before_name='<invoke name="',
    after_name='">',
    arguments=KeyedArguments(
        before_key=' <parameter name="', after_key='">', after_value="</parameter>", raw=True
    ),
    after_arguments=" </invoke>",
    close=" </minimax:tool_call>",
)
