"""Calls written in Python: what the families have in common.

Nested values use JSON's spelling of true, false and null.
"""

from personae.grammar.tools.arguments import KeyedArguments

ARGUMENTS = KeyedArguments(
    before_key="",
    after_key="=",
    after_value="",
    between=" , ",
    constants={"true": "True", "false": "False", "null": "None"},
    key=r"[A-Za-z_][A-Za-z0-9_]*",
)
