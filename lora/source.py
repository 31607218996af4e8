"""Where an adapter's content lies, as plain data."""

import msgspec


class AdapterSource(msgspec.Struct, frozen=True):
    """What any process of this machine can read an adapter of a known digest from.

    folders: the adapter's, as it was uploaded; of a mix those of its parts, in the order of `mix.parts_of`.
    stored: its folder also has it as pages hold it (`stored.py`).
    """

    folders: tuple[str, ...]
    stored: bool = False
