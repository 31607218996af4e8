"""For models whose chat template knows no tools: the server describes them itself (api/generic_tools.py).

The calls are written as Hermes writes them, which many models have seen.
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="generic",
    signs=(),
    trigger="<tool_call>",
    before_name='<tool_call> { "name" : "',
    after_name='" , "arguments" : ',
    after_arguments=" } </tool_call>",
)
