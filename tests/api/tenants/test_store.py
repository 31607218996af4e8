"""Tenants and keys at rest."""

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from personae.api.tenants.data import DATABASE, DataDir, serving
from personae.api.tenants.store import DEFAULT_TENANT, DEFAULTS, TenantLimits, TenantStore
from personae.errors import LoadError, RequestError


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDir]:
    data = DataDir(tmp_path / "data")
    yield data
    data.close()


@pytest.fixture
def store(data: DataDir) -> TenantStore:
    store = TenantStore(data)
    store.create_tenant("ann", TenantLimits(concurrent=3))
    store.create_tenant("bob", TenantLimits())
    return store


def test_a_key_is_its_tenants_and_has_its_role_and_limits(store: TenantStore) -> None:
    ann, bob = store.create_key("ann", "tenant"), store.create_key("bob", "admin")
    found = store.identify(ann)
    assert found is not None
    assert (found.tenant, found.role, found.limits) == (
        "ann",
        "tenant",
        TenantLimits(concurrent=3).or_else(DEFAULTS),
    )
    other = store.identify(bob)
    assert other is not None
    assert (other.tenant, other.role) == ("bob", "admin")


def test_a_tenant_is_not_without_limits_and_an_admin_has_those_that_were_given(store: TenantStore) -> None:
    store.create_tenant("root", TenantLimits(files=7))
    store.create_key("root", "admin")
    bob = store.identify(store.create_key("bob", "tenant"))
    assert bob is not None
    assert bob.limits == DEFAULTS
    for field in ("adapters", "bytes", "files", "file_bytes", "schemas_per_minute"):
        assert getattr(DEFAULTS, field) > 0
    named = {name: store.on_behalf_of(name) for name in ("ann", "bob", "root", DEFAULT_TENANT)}
    assert {name: who and who.limits for name, who in named.items()} == {
        "ann": TenantLimits(concurrent=3).or_else(DEFAULTS),
        "bob": DEFAULTS,
        "root": TenantLimits(files=7),
        DEFAULT_TENANT: TenantLimits(),
    }


def test_limits_can_be_changed_and_those_that_are_not_given_stay(store: TenantStore) -> None:
    key = store.create_key("ann", "tenant")
    store.change_limits("ann", TenantLimits(adapters=0, file_bytes=5))
    found = store.identify(key)
    assert found is not None
    assert found.limits == TenantLimits(concurrent=3, adapters=0, file_bytes=5).or_else(DEFAULTS)
    store.revoke_tenant("ann")
    for name in ("ann", "carl"):
        with pytest.raises(RequestError, match=f"no tenant '{name}'"):
            store.change_limits(name, TenantLimits())


def test_no_other_string_is_a_key(store: TenantStore) -> None:
    key = store.create_key("ann", "tenant")
    other = store.create_key("bob", "tenant")
    wrong = [
        "",
        "psn_",
        key[:-1],
        key + "0",
        key.upper(),
        " " + key,
        key[:17] + other[17:],
        f"{key}\n",
        "é" * 80,
    ]
    assert [store.identify(each) for each in wrong] == [None] * len(wrong)
    last = "0" if key[-1] != "0" else "1"
    assert store.identify(key[:-1] + last) is None


def test_the_directory_holds_no_secret_of_a_key_and_others_cannot_read_it(
    store: TenantStore, data: DataDir
) -> None:
    secret = store.create_key("ann", "tenant").rpartition("_")[2]
    for file in data.path.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes()
            assert bytes.fromhex(secret) not in file.read_bytes()
    assert stat.S_IMODE(data.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((data.path / DATABASE).stat().st_mode) == 0o600


def test_revoking_a_key_or_its_tenant_ends_it_at_once_and_for_ever(store: TenantStore) -> None:
    one, two, three = (store.create_key("ann", "tenant") for _ in range(3))
    store.revoke_key(one)  # by the whole key
    store.revoke_key(two.split("_")[1])  # by its id
    assert store.identify(one) is None
    assert store.identify(two) is None
    assert store.identify(three) is not None
    store.revoke_tenant("ann")
    assert store.identify(three) is None
    with pytest.raises(RequestError, match="no tenant 'ann'"):
        store.create_key("ann", "tenant")
    with pytest.raises(RequestError, match="is or was a tenant 'ann'"):
        store.create_tenant("ann", TenantLimits())
    assert store.has_keys(), "a server whose keys are all revoked is not open"


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "a/b", "a" * 64, "ä", "a\n", "../a", "a\0"])
def test_names_of_tenants_are_plain(store: TenantStore, name: str) -> None:
    with pytest.raises(RequestError, match="no tenant's name"):
        store.create_tenant(name, TenantLimits())


def test_what_is_not_there_cannot_be_revoked(store: TenantStore) -> None:
    with pytest.raises(RequestError, match="no such tenant"):
        store.revoke_tenant("carl")
    with pytest.raises(RequestError, match="no such key"):
        store.revoke_key("carl")


def test_the_secret_outlives_a_restart_and_differs_between_directories(tmp_path: Path) -> None:
    secrets = []
    for name in ("a", "a", "b"):
        data = DataDir(tmp_path / name)
        secrets.append(data.secret)
        data.close()
    assert secrets[0] == secrets[1] != secrets[2]
    assert len(secrets[0]) == 32


def test_two_servers_cannot_share_a_directory_but_the_command_line_can_join(tmp_path: Path) -> None:
    with serving(tmp_path) as data:
        with pytest.raises(LoadError, match="another server is using it"), serving(tmp_path):
            pass
        overlap = DataDir(tmp_path)
        TenantStore(overlap).create_tenant("late", TenantLimits())
        overlap.close()
        assert [tenant.name for tenant in TenantStore(data).list_tenants()] == ["late"]
    with serving(tmp_path):
        pass


def test_without_a_directory_everything_is_forgotten() -> None:
    with serving(None) as data:
        path = data.path
        assert path.is_dir()
    assert not path.exists()


def test_a_directory_that_cannot_be_used_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="--data-dir"):
        DataDir(tmp_path / "file")
    (tmp_path / DATABASE).write_text("not a database at all, " * 100)
    with pytest.raises(LoadError, match="not a database"):
        DataDir(tmp_path)


def test_a_write_that_fails_changes_nothing(store: TenantStore, data: DataDir) -> None:
    with pytest.raises(sqlite3.IntegrityError), data.write() as db:
        db.executemany("insert into tenants values (?, 0, null, '{}')", [("carl",), ("ann",)])
    assert [tenant.name for tenant in store.list_tenants()] == ["ann", "bob"]
