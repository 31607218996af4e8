"""Writes formats as patterns, where a backend lacks the format or lets invalid strings through.

The patterns may accept less than their RFC (no leap seconds, no year 0), never more.
"""

from typing import Any

from personae.grammar.schema.walk import rebuild

# The formats that JSON Schema defines. It says to ignore others.
FORMATS = frozenset(
    {
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
    }
    | {"uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"}
    | {"relative-json-pointer", "regex"}
)

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

# RFC 3986 without IP literals, user names, and unusual schemes.
_CHARACTER = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:{_CHARACTER}|[:/])*"
_HOST = "[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*(?::[0-9]{1,5})?"
_AUTHORITY = f"//{_HOST}(?:/{_PATH})?"
_TAIL = rf"(?:\?(?:{_CHARACTER}|[:/?])*)?(?:#(?:{_CHARACTER}|[:/?])*)?"
_ABSOLUTE = f"(?:(?:https?|ftp|wss?):{_AUTHORITY}|(?:urn|mailto|tel|data|tag):{_CHARACTER}{_PATH}){_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}|/(?:{_CHARACTER}+(?:/{_PATH})?)?|{_CHARACTER}+(?:/{_PATH})?)?{_TAIL}"
_REFERENCE = f"(?:{_ABSOLUTE}|{_RELATIVE})"

# RFC 1123, at most 253 characters and ten labels. Two hyphens in a row would be for names that IDNA encodes.
_WORD = "[A-Za-z0-9]"
_LABEL = f"(?:{_WORD}{{1,61}}|{_WORD}{{1,20}}(?:-{_WORD}{{1,20}}){{1,2}})"
_SHORT = f"{_WORD}{{1,10}}(?:-{_WORD}{{1,10}})?"
_HOSTNAME = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,3}}|{_SHORT}(?:\.{_SHORT}){{4,9}})"

# RFC 5321 without quotes and numeric addresses: 64 characters before the sign.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = (
    rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{2}}"
    rf"|{_ATOM}{{1,12}}(?:\.{_ATOM}{{1,12}}){{3,4}})"
)
_EMAIL = f"{_LOCAL}@{_HOSTNAME}"

# IDNA 2008 with lower-case Latin letters, in labels that are short enough when they are encoded.
_LETTER = "[a-z0-9ß-öø-ÿ]"
_IDN_HOSTNAME = rf"(?:{_HOSTNAME}|{_LETTER}{{1,12}}(?:\.{_LETTER}{{1,12}}){{0,3}})"
_IDN_EMAIL = (
    rf"(?:{_EMAIL}|{_LETTER}{{1,12}}(?:\.{_LETTER}{{1,12}})?@{_LETTER}{{1,12}}(?:\.{_LETTER}{{1,12}}){{1,2}})"
)

# RFC 6570 with ASCII letters.
_VARIABLE = r"\w+(?:\.\w+)*(?:\*|:[1-9][0-9]{0,3})?".replace(r"\w", "[A-Za-z0-9_]")
_TEMPLATE = (
    "(?:[A-Za-z0-9._~!$&()*+,;=:/?#@-]|%[0-9A-Fa-f]{2}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

# ECMA-262: characters, classes, repetitions, alternatives, and groups without groups in them.
_ONE = (
    r"(?:[A-Za-z0-9 _,:;=!@#%&~<>/'\"-]|\.|\\[dDwWsS^$.*+?()\[\]{}|/\\]"
    r"|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9 _.,:;=!?@#%&<>/'\"$*+()]|\\[dwsDWS.*+?^$()\[\]{}|/\\-])+-?\])"
)
_TERMS = rf"(?:{_ONE}(?:[*+?]\??|\{{[0-9]{{1,2}}\}}|\{{[0-9],(?:[1-9][0-9])?\}})?)*"
_GROUP = rf"\((?:\?:)?{_TERMS}(?:\|{_TERMS})*\)"
_EXPRESSION = rf"\^?{_TERMS}(?:(?:{_GROUP}[*+?]?|\|){_TERMS})*\$?"

_POINTER = "(?:/(?:[^/~]|~[01])*)*"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "uri-reference": _REFERENCE,
    "iri": _ABSOLUTE,
    "iri-reference": _REFERENCE,
    "idn-email": _IDN_EMAIL,
    "idn-hostname": _IDN_HOSTNAME,
    "uri-template": _TEMPLATE,
    "regex": _EXPRESSION,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}

WIDE = {
    "date": r"^\d{4}-\d{2}-\d{2}$",
    "time": r"^\d{2}:\d{2}:\d{2}",
    "date-time": r"^\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}",
    "duration": "^P[0-9A-Z.,]+$",
    "email": "@",
    "idn-email": "@",
    "hostname": r"^[A-Za-z0-9_.-]*$",
    "ipv4": r"^\d{1,3}(\.\d{1,3}){3}$",
    "ipv6": "^[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%.*)?$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*:",
    "iri": r"^[A-Za-z][A-Za-z0-9+.-]*:",
    "uuid": "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "json-pointer": "^(/.*)?$",
    "relative-json-pointer": "^[0-9]",
}
"""Patterns that match everything that a format accepts, and more. A string that they do not match is not of
the format."""


def spell_formats(schema: Any) -> Any:
    """The schema with the formats of `PATTERNS` written as patterns."""
    if not isinstance(schema, dict):
        return schema
    spelled = rebuild(schema, lambda _, child: spell_formats(child))
    if spelled.get("format") in PATTERNS:
        pattern = PATTERNS[spelled.pop("format")]
        spelled["allOf"] = [*spelled.get("allOf", ()), {"pattern": f"^(?:{pattern})$"}]
    return spelled
