"""`encrypted_content` of a reasoning item, for clients that send back nothing else of the reasoning.

Nothing has to be hidden here, because `content` also has the reasoning. So this is its text in another
encoding, marked as this server's.
"""

import base64
import binascii

_OURS = "personae-1."


def sealed(text: str) -> str:
    """The reasoning as `encrypted_content`."""
    return _OURS + base64.urlsafe_b64encode(text.encode()).decode()


def unsealed(content: str) -> str | None:
    """The reasoning; None if another server has written this."""
    if not content.startswith(_OURS):
        return None
    try:
        return base64.b64decode(content[len(_OURS) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
