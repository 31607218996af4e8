"""For models whose chat template cannot show tools: the server describes them itself (api/generic_tools.py).

Calls are written as in Hermes, which many models have seen.
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
