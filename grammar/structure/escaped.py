"""Rewrites a Lark grammar for texts inside a JSON string: the same texts, escaped as JSON requires.

Strings are escaped. Regular expressions lose the texts that would have to be escaped: quotes, backslashes and
control characters. So everything that the result writes is, read as JSON, text of the grammar.
"""

import json
import re

from personae.errors import GrammarError

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<flags>i?)(?P<range>\s*\.\.)?
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<odd>~|%(?!llguidance)\w+|\[(?:suffix|stop|lazy|capture|max_tokens|temperature)\b)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_SAFE = r"/[^\"\\\x00-\x1F\x7F]*/"
_NAME = "PLAIN_TEXT_"


def escaped_lark(source: str, param: str) -> str:
    """The escaped grammar. Raises GrammarError, with `param`, if a part cannot be escaped by itself."""
    terminals: list[str] = []
    written = []
    for found in _TOKEN.finditer(source):
        match found.lastgroup:
            case "comment":
                continue
            case "odd":
                message = (
                    f"this model writes the input as a JSON string, where {found['odd']!r} cannot be written"
                )
                raise GrammarError(f"`{param}`: {message}.", param=param)
            case "regex":
                terminals.append(f"{_NAME}{len(terminals)}: {found['regex']} & {_SAFE}")
                written.append(f"{_NAME}{len(terminals) - 1}")
            case "other":
                written.append(found[0])
            case _:
                written.append(_string(found, param))
    return "".join(written) + "\n" + "\n".join(terminals) + "\n"


def _string(found: re.Match[str], param: str) -> str:
    try:
        text = json.loads(found["string"])
    except ValueError:
        raise GrammarError(f"`{param}`: {found['string']} is not a string.", param=param) from None
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    if escaped != text and (found["flags"] or found["range"]):
        raise GrammarError(f"`{param}`: {found[0]} cannot be written in a JSON string.", param=param)
    return json.dumps(escaped, ensure_ascii=False) + found["flags"] + (found["range"] or "")
