"""What the host keeps of adapters, beside what the device has."""

from pathlib import Path

from tiny_adapters import lora_shapes, make_adapter_folder, tiny_config

from personae.lora.library import AdapterLibrary
from personae.lora.mix_id import mix_id
from personae.lora.peft import read_adapter

BASE = tiny_config()
SHAPES = lora_shapes(BASE)


def library_of(folder: Path, stored: str | None) -> tuple[AdapterLibrary, str]:
    place = make_adapter_folder(folder, BASE, rank=4, targets=("q_proj",))
    digest = read_adapter(place, SHAPES).digest
    return AdapterLibrary(SHAPES, {digest: place}, None, 2**20, stored=stored), digest


def test_where_the_devices_memory_is_the_hosts_an_adapter_is_kept_once(tmp_path: Path) -> None:
    library, digest = library_of(tmp_path / "one", "F32")
    source = library.read(digest)
    assert library.kept[0] == 1
    library.take(digest, source)
    library.placed(digest)
    library.placed(digest)
    assert library.kept == (0, 0)
    assert library.find(digest) is None
    again = library.read(digest)
    assert library.take(digest, again).digest == digest
    assert library.kept[0] == 1


def test_a_gpus_adapters_stay_on_the_host_too(tmp_path: Path) -> None:
    library, digest = library_of(tmp_path / "one", None)
    source = library.read(digest)
    library.placed(digest)
    assert library.find(digest) == source


def test_a_mix_stays_on_the_host(tmp_path: Path) -> None:
    library, digest = library_of(tmp_path / "one", "F32")
    mix = mix_id([(digest, 0.5)])
    source = library.read(mix)
    library.placed(mix)
    assert library.find(mix) == source
