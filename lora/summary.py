"""What a server keeps of an adapter that it has checked, as plain data."""

import msgspec


class AdapterSummary(msgspec.Struct, frozen=True):
    """An adapter's digest, its ranks by module, what it has in addition to low rank on linear modules
    (`traits`), and its activating tokens (aLoRA). bytes: what its folder takes on the disk."""

    digest: str
    ranks: dict[str, int]
    traits: tuple[str, ...]
    invocation: tuple[int, ...]
    bytes: int
