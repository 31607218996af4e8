"""How the APIs differ that are answered as chat completions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """The limits of one API. `most_tools` and `longest_name` limit the tools of a request and the characters
    of their names. `clamps`: by default, a `max_tokens` that is too large becomes what fits."""

    most_tools: int
    longest_name: int
    clamps: bool = False


MOST_OF_NAME = 128
"""The most characters of a tool's name in the newer APIs."""

CHAT = Dialect(most_tools=128, longest_name=64)
MESSAGES = Dialect(most_tools=1024, longest_name=MOST_OF_NAME, clamps=True)
RESPONSES = Dialect(most_tools=1024, longest_name=2 * MOST_OF_NAME + 2, clamps=True)
"""The longest name is that of a tool in a namespace, joined to the namespace's name."""
