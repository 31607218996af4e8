"""For models whose chat template cannot show tools, and whose own format of calls is not known: the server
describes the tools itself (api/templates/tool_text.py).

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
