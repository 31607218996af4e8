"""`encrypted_content` of a reasoning item: what a client that keeps nothing else of the reasoning sends back.

Nothing has to be hidden here, as the item has the reasoning in `content` as well. So this is its text in
another spelling, which says who has written it.
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
