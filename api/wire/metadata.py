"""The bounds of `metadata`, as OpenAI has them."""

from collections.abc import Mapping

from personae.errors import RequestError

_PAIRS, _KEY, _VALUE = 16, 64, 512


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises RequestError for too many pairs, or for one that is too long."""
    found = metadata or {}
    if len(found) > _PAIRS or any(len(k) > _KEY or len(v) > _VALUE for k, v in found.items()):
        raise RequestError(
            f"`metadata` may have {_PAIRS} pairs, their keys {_KEY} characters and their values {_VALUE}.",
            param="metadata",
        )
