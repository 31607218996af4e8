"""What a server keeps about a checked adapter, as plain data."""

import msgspec


class AdapterSummary(msgspec.Struct, frozen=True):
    """An adapter's digest, its ranks by module, its features beyond low rank on linear modules (`traits`),
    and its invocation tokens (aLoRA). bytes: the size of its folder on disk."""

    digest: str
    ranks: dict[str, int]
    traits: tuple[str, ...]
    invocation: tuple[int, ...]
    bytes: int
