"""gpt-oss: a call is a message to its function, and ends the answer.

https://developers.openai.com/cookbook/articles/openai-harmony
"""

from personae.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    name="harmony",
    signs=("<|channel|>", "<|message|>", "functions."),
    trigger="<|channel|>commentary to=functions.",
    before_name="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    after_arguments="",
    anywhere=False,
    single=True,
)
