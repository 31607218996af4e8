"""The contents of adapters and files in an object store, and what happens when they are not as they were."""

import json
from pathlib import Path

import pytest

from personae.api.object_store import ObjectStore
from personae.api.tenants.data import serving
from personae.engine.object_stores import check_store_url
from personae.errors import LoadError, StorageFailed

pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def store(bucket: Path, tmp_path: Path) -> ObjectStore:
    store = ObjectStore(f"file://{bucket}")
    (tmp_path / "config").write_bytes(b"{}")
    (tmp_path / "tensors").write_bytes(bytes(range(256)) * 4096)
    store.put("adapters/one", {"config": tmp_path / "config", "tensors": tmp_path / "tensors"})
    return store


def test_what_was_put_is_got_whole(store: ObjectStore, tmp_path: Path) -> None:
    assert store.has("adapters/one")
    store.get("adapters/one", tmp_path / "got")
    assert {each.name: each.read_bytes() for each in (tmp_path / "got").iterdir()} == {
        "config": b"{}",
        "tensors": bytes(range(256)) * 4096,
    }
    store.delete("adapters/one")
    store.delete("adapters/one")
    assert not store.has("adapters/one")
    with pytest.raises(StorageFailed, match="has no adapters/one"):
        store.get("adapters/one", tmp_path / "again")


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone", "manifest", "manifest gone"])
def test_what_is_damaged_or_missing_is_refused_and_leaves_nothing(
    store: ObjectStore, bucket: Path, tmp_path: Path, damage: str
) -> None:
    tensors, manifest = (bucket / "adapters/one" / name for name in ("tensors", "manifest.json"))
    data = tensors.read_bytes()
    match damage:
        case "flipped":
            tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "shorter":
            tensors.write_bytes(data[:-1])
        case "longer":
            tensors.write_bytes(data * 3)
        case "gone":
            tensors.unlink()
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-1])
        case _:
            manifest.unlink()
    with pytest.raises(StorageFailed, match=r"damaged|missing|has no"):
        store.get("adapters/one", tmp_path / "got")
    assert {each.name for each in tmp_path.iterdir()} == {"bucket", "config", "tensors"}


def test_a_manifest_cannot_write_elsewhere(store: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    manifest = bucket / "adapters/one/manifest.json"
    entries = json.loads(manifest.read_bytes())
    entries["../../outside"] = entries.pop("config")
    manifest.write_text(json.dumps(entries))
    with pytest.raises(StorageFailed):
        store.get("adapters/one", tmp_path / "got")
    assert not (tmp_path.parent / "outside").exists()


def test_a_store_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match=r"^--object-store file://.* cannot be used: [^\n]*\.$"):
        ObjectStore(f"file://{tmp_path}/file/below")


def test_missing_credentials_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "sesame",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("personae.api.object_store.RETRIES", 0)
    with pytest.raises(LoadError, match=r"^--object-store s3://bucket/x cannot be used: [^\n]*\.$") as caught:
        ObjectStore("s3://bucket/x")
    assert "sesame" not in caught.value.message


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "az://container/x?sig=secret"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="has no credentials") as caught:
        check_store_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "bucket", "file://folder"])
def test_another_kind_of_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no object store"):
        check_store_url(url)


def test_an_object_store_needs_a_shared_database_and_a_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(LoadError, match="give --database-url too"),
        serving(tmp_path / "d", object_store="file:///x"),
    ):
        pass
    with pytest.raises(LoadError, match="need --data-dir"), serving(None, object_store="file:///x"):
        pass
