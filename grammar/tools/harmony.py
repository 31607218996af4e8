"""gpt-oss: a call is a message to its function, and ends the answer. Models name the function after the
channel, chat templates before it. After calls in the template's form, models use that form too.

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
    other=ToolFormat(
        name="harmony",
        signs=(),
        trigger="to=functions.",
        before_name="to=functions.",
        after_name="<|channel|>commentary json<|message|>",
        after_arguments="",
        anywhere=False,
        single=True,
    ),
)
