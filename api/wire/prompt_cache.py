"""OpenAI's fields for the prompt cache."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LONGEST_NAME = 256

SessionName = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
"""`prompt_cache_key`: the session that a request belongs to."""

Retention = Literal["in_memory", "in-memory", "24h"]
"""`prompt_cache_retention`: where keys and values may be kept. With "24h" also on a disk."""


class CacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`prompt_cache_options`. `ttl`: how long the session is kept at least, if there is room."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: None = None
    prewarm: Literal[False] | None = None
