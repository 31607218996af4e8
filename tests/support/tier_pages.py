"""Pages for tiers: their keys, random contents, and what a tier has of them."""

import numpy as np

from personae.engine.plan import PageKey, PageOwner
from personae.engine.scheduling.page_names import page_keys, root_key, session_digest, tenant_digest
from personae.engine.tiers.tier import PageBytes, PageFetch, Tier

PAGE = 5000
BOUND = 2**20
ANN, BOB = (PageOwner(tenant_digest(name), 1.0) for name in ("ann", "bob"))
CHAT = ANN._replace(session=session_digest("chat"))


def keys(count: int, salt: bytes = b"ann", first: int = 0) -> list[PageKey]:
    return page_keys(root_key(salt, None), range(first, first + 4 * count), 4)


def content(count: int, seed: int = 0) -> PageBytes:
    return np.random.default_rng(seed).integers(0, 256, (count, PAGE), np.uint8)


def store(tier: Tier, names: list[PageKey], pages: PageBytes, owner: PageOwner = ANN) -> None:
    tier.store(names, [owner] * len(names), lambda: pages)


def fetched(tier: Tier, wanted: list[PageKey]) -> tuple[int, PageBytes | None]:
    ticket = tier.reserve(len(wanted))
    count = tier.fetch(PageFetch(ticket, (), tuple(wanted)))
    pages = tier.take(ticket).copy() if count else None
    tier.discard(ticket)
    return count, pages
