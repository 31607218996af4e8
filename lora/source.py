"""Where an adapter's content is, as plain data."""

import msgspec


class AdapterSource(msgspec.Struct, frozen=True):
    """From where any process of this machine can read an adapter of a known digest.

    folders: the adapter's folder, as uploaded; for a mix, the folders of its parts, in the order of
    `mix.parts_of`. stored: its folder also has it in the form of the pool's pages (`stored.py`).
    """

    folders: tuple[str, ...]
    stored: bool = False
