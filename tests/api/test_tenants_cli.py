"""`personae tenants`, `keys` and `adapters`, and what `serve` makes of them."""

import json
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from live_server import serving
from typer.testing import CliRunner, Result
from uploads import TENSORS, UploadFixture, open_fixture, whole

from personae.api.adapters.records import AdapterRecord
from personae.api.cli import app
from personae.api.commands import serve
from personae.api.commands.startup import StartUp
from personae.api.options import ServeOptions
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import DEFAULTS, Identity, TenantLimits, TenantStore
from personae.api.tenants.usage import NUMBERS, UsageLedger
from personae.errors import LoadError, StorageFailed


def call(line: str, *, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, line.split(), env=env)


def identify(path: Path, key: str) -> object:
    data = DataDir(path)
    try:
        return TenantStore(data).identify(key)
    finally:
        data.close()


def test_from_a_tenant_to_a_key_and_back(tmp_path: Path) -> None:
    where = f"--data-dir {tmp_path}"
    made = call(f"tenants create ann {where} --requests-per-minute 60 --adapter-bytes 2GiB --adapters 3")
    assert (made.exit_code, made.stdout) == (0, "tenant ann created\n")
    keys = [call(f"keys create ann {where} {flag}").stdout.strip() for flag in ("", "--admin")]
    found = [identify(tmp_path, key) for key in keys]
    limits = TenantLimits(requests_per_minute=60, adapters=3, bytes=2 * 2**30)
    assert [(each.tenant, each.role, each.limits) for each in found] == [
        ("ann", "tenant", limits.or_else(DEFAULTS)),
        ("ann", "admin", limits),
    ]
    listed = call(f"tenants list {where}").stdout
    assert re.fullmatch(
        r"NAME +CREATED +REVOKED +LIMITS\n"
        r"ann +\d{4}-\d\d-\d\d \d\d:\d\d +requests_per_minute=60 adapters=3 adapter_bytes=\d+\n",
        listed,
    )
    listed = call(f"keys list {where}").stdout
    assert [line.split()[:3] for line in listed.splitlines()] == [
        ["ID", "TENANT", "ROLE"],
        [found[0].key, "ann", "tenant"],
        [found[1].key, "ann", "admin"],
    ]
    assert not any(key in listed or key.rpartition("_")[2] in listed for key in keys)
    changed = call(f"tenants limit ann {where} --file-bytes 5MiB --batches 2 --files 3 --weight 2")
    assert (changed.exit_code, changed.stdout) == (0, "limits of tenant ann changed\n")
    now = TenantLimits(file_bytes=5 * 2**20, batches=2, files=3, weight=2).or_else(limits)
    assert identify(tmp_path, keys[1]).limits == now
    assert call(f"keys revoke {found[0].key} {where}").exit_code == 0
    assert [identify(tmp_path, key) is None for key in keys] == [True, False]
    assert [key["revoked"] is not None for key in json.loads(call(f"keys list {where} --json").stdout)] == [
        True,
        False,
    ]
    assert call(f"tenants revoke ann {where}").exit_code == 0
    assert identify(tmp_path, keys[1]) is None


def test_a_thousand_tenants_come_from_one_file_or_none(tmp_path: Path) -> None:
    where, file = f"--data-dir {tmp_path / 'data'}", tmp_path / "tenants.jsonl"
    lines = [json.dumps({"name": f"t{n}", "limits": {"concurrent": n}}) for n in range(1000)]
    file.write_text("\n".join([*lines, json.dumps({"name": "t5"})]))
    refused = call(f"tenants import {file} {where}")
    assert (refused.exit_code, "'t5'" in refused.stderr) == (1, True)
    file.write_text(json.dumps({"name": "x", "limits": {"conccurrent": 1}}))
    assert "conccurrent" in call(f"tenants import {file} {where}").stderr
    assert json.loads(call(f"tenants list {where} --json").stdout) == []
    file.write_text("\n".join(lines))
    begun = time.perf_counter()
    made = call(f"tenants import {file} {where} --keys")
    assert time.perf_counter() - begun < 20  # they are one transaction; one each took 90 s for 100
    pairs = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(pairs) == 1000
    one = identify(tmp_path / "data", pairs[7]["key"])
    assert (one.tenant, one.limits.concurrent) == ("t7", 7)


def test_keys_have_labels_and_expiries_and_are_rotated(tmp_path: Path) -> None:
    where = f"--data-dir {tmp_path}"
    call(f"tenants create ann {where}")
    old = call(f"keys create ann {where} --label laptop --expires 30d").stdout.strip()
    [key] = json.loads(call(f"keys list {where} --json --tenant ann").stdout)
    assert key["label"] == "laptop"
    assert abs(key["expires"] - time.time() - 30 * 86400) < 60
    assert call(f"keys change {key['id']} {where} --label desk --expires 2100-01-01").exit_code == 0
    new = call(f"keys rotate {key['id']} {where}").stdout.strip()
    assert identify(tmp_path, old) is None
    assert identify(tmp_path, new).tenant == "ann"
    assert "desk" in call(f"keys list {where}").stdout.splitlines()[2]
    assert call(f"keys create ann {where} --expires soon").exit_code == 2
    late = call(f"keys create ann {where} --expires 99999999d")
    assert (late.exit_code, "is beyond the year 9999" in late.output) == (2, True)
    assert call(f"keys create ann {where} --expires 2001-01-01").exit_code == 2


def test_a_revoked_name_is_freed_and_usage_is_shown(tmp_path: Path) -> None:
    where = f"--data-dir {tmp_path}"
    call(f"tenants create ann {where}")
    assert "has not been revoked" in call(f"tenants free ann {where}").stderr
    with closing(DataDir(tmp_path)) as data:
        ledger = UsageLedger(data, lambda: 1_800_000_000)
        ledger.add(Identity("ann", "tenant", key="k1"), "poet", 10, 4, 6, 2.5, 0.25)
        ledger.flush()
    table = call(f"usage {where}").stdout.splitlines()
    assert [line.split() for line in table] == [
        ["TENANT", "ADAPTER", *map(str.upper, NUMBERS)],
        ["ann", "poet", "1", "10", "4", "6", "2.5", "2027-01-15", "08:00", "0.25"],
    ]
    assert call(f"usage {where} --csv --by key").stdout.splitlines()[1] == "k1,1,10,4,6,2.5,1800000000,0.25"
    [row] = json.loads(call(f"usage {where} --json --by hour --from 2027-01-15").stdout)
    assert row["hour"] == 1_800_000_000
    assert json.loads(call(f"usage {where} --json --to 2027-01-15").stdout) == []
    call(f"tenants revoke ann {where}")
    assert call(f"tenants create ann {where}").exit_code == 1
    assert call(f"tenants free ann {where}").exit_code == 0
    assert call(f"tenants create ann {where}").exit_code == 0


@pytest.mark.parametrize(
    "line", ["keys create nobody", "keys revoke nothing", "tenants revoke nobody", "tenants create A.B"]
)
def test_what_cannot_be_is_one_line_and_exit_code_2(line: str, tmp_path: Path) -> None:
    result = call(f"{line} --data-dir {tmp_path}")
    assert result.exit_code == 2
    assert re.fullmatch(r"error: .*\n", result.stderr)


def test_a_server_that_others_reach_does_not_start_without_keys(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"(?s)no API keys.*keys create me.*--insecure-no-auth"):
        serve.run(ServeOptions(host="0.0.0.0", port=0, data_dir=tmp_path), StartUp(drawn=False))
    with pytest.raises(LoadError, match="no API keys"):
        serve.run(ServeOptions(host="0.0.0.0", port=0), StartUp(drawn=False))


@pytest.mark.parametrize("reason", ["keys", "insecure", "loopback"])
def test_it_starts_with_keys_or_on_the_loopback_or_when_told_not_to_care(reason: str, tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    if reason == "keys":
        TenantStore(data).create_tenant("ann", TenantLimits())
        TenantStore(data).create_key("ann", "tenant")
    data.close()
    host = "127.0.0.1" if reason == "loopback" else "0.0.0.0"
    insecure = reason == "insecure"
    options = ServeOptions(Path("nowhere"), host=host, port=0, data_dir=tmp_path, insecure_no_auth=insecure)
    with pytest.raises(LoadError, match="nowhere"):  # that is, it comes as far as looking for the model
        serve.run(options, StartUp(drawn=False))


@pytest.fixture
def fixture(tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator of the fixture and its address
    with open_fixture(tmp_path / "data", FakeEngine()) as fixture, serving(fixture.app) as url:
        yield fixture, url


def test_push_list_and_remove(fixture: tuple[UploadFixture, str], tmp_path: Path) -> None:
    served, url = fixture
    folder = tmp_path / "poet"
    folder.mkdir()
    for name, content in whole().items():
        (folder / name).write_bytes(content)
    key = served.key("ann")
    env = {"PERSONAE_API_KEY": key}
    pushed = call(f"adapters push {folder} --url {url}", env=env)
    assert pushed.exit_code == 0, pushed.output
    assert re.fullmatch(r"poet version 1 sha256 [0-9a-f]{64}\n", pushed.stdout)
    again = call(f"adapters push {folder} --url {url}", env=env)
    assert (again.exit_code, "`replace`" in again.stderr) == (1, True)
    assert "version 2" in call(f"adapters push {folder} --url {url} --replace", env=env).stdout
    assert call(f"adapters push {folder} --name other --url {url} --key {key}").exit_code == 0
    assert call(f"adapters push {folder} --name all --shared --url {url}", env=env).exit_code == 1
    names, own, *listed = call(f"adapters list --url {url}", env=env).stdout.splitlines()
    assert names.split() == ["TENANT", "NAME", "VERSION", "RANK", "TARGETS", "SIZE", "NOTE"]
    assert re.split("  +", own.strip()) == ["team/pirate", "8", "the server's own"]
    assert [line.split()[:4] for line in listed] == [
        ["other", "1", "2", "q_proj,v_proj"],
        ["poet", "2", "2", "q_proj,v_proj"],
    ]
    whole_list = json.loads(call(f"adapters list --json --url {url}", env=env).stdout)
    assert [(record["name"], record["uploaded"]) for record in whole_list] == [
        ("team/pirate", False),
        ("other", True),
        ("poet", True),
    ]
    assert call(f"adapters remove poet --url {url}", env=env).stdout == "poet removed\n"
    gone = call(f"adapters remove poet --url {url}", env=env)
    assert (gone.exit_code, gone.stderr) == (1, "error: There is no adapter `poet`.\n")
    refused = call(f"adapters list --url {url}")
    assert (refused.exit_code, "PERSONAE_API_KEY" in refused.stderr) == (1, True)
    (folder / TENSORS).unlink()
    missing = call(f"adapters push {folder} --url {url}", env=env)
    assert (missing.exit_code, TENSORS in missing.stderr) == (2, True)


def test_without_a_data_directory_a_server_is_asked(fixture: tuple[UploadFixture, str]) -> None:
    served, url = fixture
    root = served.key("root", "admin")

    def ask(line: str, env: dict[str, str] | None = None) -> Result:
        return call(f"{line} --url {url}", env=env or {"PERSONAE_API_KEY": root})

    made = ask("tenants create ann --requests-per-minute 60 --adapter-bytes 2GiB")
    assert (made.exit_code, made.stdout) == (0, "tenant ann created\n")
    key = ask("keys create ann --label laptop --expires 30d").stdout.strip()
    found = served.tenants.identify(key)
    assert found is not None
    assert (found.tenant, found.role, found.limits.bytes) == ("ann", "tenant", 2 * 2**30)
    assert ask("tenants limit ann --weight 2").stdout == "limits of tenant ann changed\n"
    assert re.search(r"(?m)^ann .* weight=2", ask("tenants list").stdout)
    [shown] = json.loads(ask("keys list --tenant ann --json").stdout)
    assert (shown["id"], shown["label"]) == (found.key, "laptop")
    assert ask(f"keys change {found.key} --label desk").stdout == "key changed\n"
    assert ask("keys list --tenant ann").stdout.splitlines()[1].split()[3] == "desk"
    new = ask(f"keys rotate {found.key} --overlap 0").stdout.strip()
    assert (served.tenants.identify(key), served.tenants.identify(new) is None) == (None, False)
    assert ask(f"keys revoke {new}").stdout == "key revoked\n"
    assert served.tenants.identify(new) is None
    assert "has not been revoked" in ask("tenants free ann").stderr
    assert served.tenants.find_tenant("ann").revoked is None, "asking to free it has not revoked it"
    assert ask("tenants revoke ann").stdout == "tenant ann revoked\n"
    assert ask("tenants free ann").stdout == "tenant ann freed\n"
    assert [tenant.name for tenant in served.tenants.list_tenants()] == ["root"]
    ledger = served.app.state.services.usage
    ledger.add(Identity("bob", "tenant", key="k1"), "poet", 10, 4, 6, 2.5, 0.25)
    assert ask("usage --by key --csv").stdout.splitlines()[1].startswith("k1,1,10,4,6,2.5,")
    [row] = json.loads(ask("usage --by tenant --json --tenant bob --from 2020-01-01").stdout)
    assert (row["tenant"], row["spend"]) == ("bob", 0.25)
    assert json.loads(ask("usage --json --to 2020-01-01").stdout) == []
    refused = ask("tenants list", {"PERSONAE_API_KEY": served.key("eve")})
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)


def test_a_revocation_that_the_server_did_not_do_is_told_to_work_still(
    fixture: tuple[UploadFixture, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, url = fixture
    root, key = served.key("root", "admin"), served.key("ann")

    def full(id: str) -> None:
        raise StorageFailed("The server's disk is full; delete something, or try again later.")

    monkeypatch.setattr(served.tenants, "revoke_key", full)
    for where, why in ((url, "disk is full"), ("http://127.0.0.1:9", "does not answer")):
        done = call(f"keys revoke {key} --url {where} --key {root}")
        assert done.exit_code == 1
        assert done.stderr.startswith("error: The key was NOT revoked and still works: ")
        assert why in done.stderr


def test_a_server_and_its_records_are_not_named_together(tmp_path: Path) -> None:
    both = call(f"tenants list --url http://127.0.0.1:9 --data-dir {tmp_path}")
    assert (both.exit_code, "give one of them" in both.stderr) == (2, True)
    (tmp_path / "tenants.jsonl").write_text('{"name": "ann"}')
    imported = call(f"tenants import {tmp_path / 'tenants.jsonl'}")
    assert (imported.exit_code, "give --data-dir or --database-url" in imported.stderr) == (2, True)


def test_an_admin_lists_and_removes_any_tenants_adapters(
    fixture: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    served, url = fixture
    folder = tmp_path / "poet"
    folder.mkdir()
    for name, content in whole().items():
        (folder / name).write_bytes(content)
    ann, root = served.key("ann"), served.key("root", "admin")
    assert call(f"adapters push {folder} --url {url} --key {ann}").exit_code == 0
    _, *listed = call(f"adapters list --tenant * --url {url} --key {root}").stdout.splitlines()
    assert [line.split()[:3] for line in listed] == [["ann", "poet", "1"]]
    assert call(f"adapters list --tenant * --url {url} --key {ann}").exit_code == 1
    assert call(f"adapters remove poet --url {url} --key {root}").exit_code == 1
    assert call(f"adapters remove poet --tenant ann --url {url} --key {root}").exit_code == 0
    assert json.loads(call(f"adapters list --json --tenant ann --url {url} --key {root}").stdout) == []


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    result = call("adapters list --url http://127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: http://127.0.0.1:9 does not answer")
    assert "--url" in result.stderr


def test_the_servers_own_adapters_are_listed_and_stay(fixture: tuple[UploadFixture, str]) -> None:
    _, url = fixture
    listed = call(f"adapters list --url {url}/v1")
    assert re.split("  +", listed.stdout.splitlines()[1].strip()) == ["team/pirate", "8", "the server's own"]
    kept = call(f"adapters remove base --url {url}")
    assert (kept.exit_code, "`base` is the server's own" in kept.stderr) == (1, True)


def test_an_adapter_without_ranks_is_listed(
    fixture: tuple[UploadFixture, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, url = fixture
    record = AdapterRecord("adapter-1", "plain", 1, "0" * 64, {}, ["norm"], 12, 0, "base", False)
    monkeypatch.setattr(served.registry, "list", lambda tenant: [record])
    listed = call(f"adapters list --url {url}").stdout.splitlines()
    assert re.split("  +", listed[-1].strip()) == ["plain", "1", "0", "norm", "12 bytes"]


def test_a_pickle_is_not_sent_and_its_owner_told_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    refused = call(f"adapters push {tmp_path}")
    assert refused.exit_code == 2
    assert "pickle" in refused.stderr
    assert "save_pretrained" in refused.stderr


def test_who_makes_a_data_directory_is_told_so(tmp_path: Path) -> None:
    made = call(f"tenants create ann --data-dir {tmp_path / 'typo'}")
    assert made.stdout == f"tenant ann created, and the data directory {tmp_path / 'typo'}\n"


@pytest.mark.parametrize("line", ["keys create me", "keys list", "tenants list", "tenants revoke me"])
def test_a_data_directory_that_is_not_there_is_not_made(line: str, tmp_path: Path) -> None:
    result = call(f"{line} --data-dir {tmp_path / 'typo'}")
    assert result.exit_code == 2
    assert "no data directory" in result.stderr
    assert not (tmp_path / "typo").exists()


def test_a_key_of_the_command_line_is_an_admins_and_closes_the_server(tmp_path: Path) -> None:
    with closing(DataDir(tmp_path)) as data:
        store = TenantStore(data, "sesame")
        assert store.has_keys()
        assert store.identify("sesame") == Identity("default", "admin")
        assert store.identify("sesam") is None
        assert not TenantStore(data).has_keys(), "it is kept nowhere"
    with pytest.raises(LoadError, match="--api-key"):
        serve.run(ServeOptions(port=0, api_key=""), StartUp(drawn=False))
    with pytest.raises(LoadError, match="nowhere"):
        serve.run(
            ServeOptions(Path("nowhere"), host="0.0.0.0", port=0, api_key="sesame"), StartUp(drawn=False)
        )


def test_many_folders_are_pushed_for_a_tenant_and_a_version_is_rolled_back(
    fixture: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    uploads, url = fixture
    root, ann = uploads.key("root", "admin"), uploads.key("ann")
    end = f"--url {url} --key {root} --tenant ann"
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for name, content in whole(seed).items():
            (folder / name).write_bytes(content)
    every = " ".join(map(str, folders))
    pushed = call(f"adapters push {every} {end}")
    assert pushed.exit_code == 0, pushed.output
    assert sorted(line.split()[0] for line in pushed.stdout.splitlines()) == ["one", "three", "two"]
    partly = call(f"adapters push {every} {tmp_path / 'none'} {end} --replace")
    assert (partly.exit_code, len(partly.stdout.splitlines())) == (1, 3)
    assert "1 of 4 adapters were not uploaded" in partly.stderr
    assert call(f"adapters push {every} --name a {end}").exit_code == 2
    assert call(f"adapters rollback one {end}").stdout == "one is one@1, pinned\n"
    assert "no version of one before 1" in call(f"adapters rollback one {end}").stderr
    assert call(f"adapters unpin one {end}").stdout == "one is one@2\n"
    assert call(f"adapters pin one 1 {end}").stdout == "one is one@1, pinned\n"
    assert call(f"adapters pin one 9 {end}").exit_code == 1
    shown = call(f"adapters versions one --url {url} --key {ann}").stdout
    assert re.search(r"one@1 .* pinned", shown)
    assert "one@2" in shown
    assert call(f"adapters alias both one@1=95 one@2=5 {end}").exit_code == 0
    assert call(f"adapters alias both one@1 {end}").exit_code == 2
    assert call(f"adapters unalias both {end}").exit_code == 0


def test_defaults_are_shown_and_changed_and_a_source_goes_to_the_server(
    fixture: tuple[UploadFixture, str], tmp_path: Path
) -> None:
    uploads, url = fixture
    end = f"--url {url} --key {uploads.key('root', 'admin')} --tenant {'ann' if uploads.key('ann') else ''}"
    (tmp_path / "poet").mkdir()
    for name, content in whole(1).items():
        (tmp_path / "poet" / name).write_bytes(content)
    assert call(f"adapters push {tmp_path / 'poet'} {end}").exit_code == 0
    (tmp_path / "new.json").write_text('{"system": "You rhyme.", "temperature": 0.5}')
    changed = call(f"adapters defaults poet {tmp_path / 'new.json'} {end}")
    assert json.loads(changed.stdout) == {"system": "You rhyme.", "temperature": 0.5}
    assert json.loads(call(f"adapters defaults poet@1 {end}").stdout)["temperature"] == 0.5
    (tmp_path / "new.json").write_text("{")
    assert "is not JSON" in call(f"adapters defaults poet {tmp_path / 'new.json'} {end}").stderr
    refused = call(f"adapters push hf://org/poet s3://b/x {end}")
    assert refused.exit_code == 1
    assert "hf://org/poet: No source may be fetched from" in refused.stderr
    assert "2 of 2 adapters were not uploaded" in refused.stderr
