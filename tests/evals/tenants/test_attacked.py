"""What one tenant may send, and how the effects on another are reported."""

import json
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from live_server import serving

from personae.api.app import create_app
from personae.api.batches.input import check
from personae.api.settings import ApiSettings
from personae.evals.tenants.attacked import COLUMNS, Found, Watched, keys_in, p99
from personae.evals.tenants.attacks import ATTACKS, BODY, Way, http_request, sender


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_is_json_that_the_server_would_read(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    body = attack.body("base")
    if attack.path == "/v1/files":
        (tmp_path / "batch").write_bytes(body)
        found = check(tmp_path / "batch", "/v1/completions", ApiSettings())
        assert (found.total, found.errors) == (16, [])
        return
    assert len(body) <= max(BODY, 8 * 2**20)
    assert msgspec.json.decode(body)


@pytest.mark.parametrize(("way", "seen"), [("ask", "400"), ("hold", "held"), ("leave", "left")])
def test_the_attackers_process_says_what_its_clients_were_told(tmp_path: Path, way: Way, seen: str) -> None:
    engine = FakeEngine()
    with serving(create_app(engine)) as address:
        url = httpx.URL(address)
        file = tmp_path / "request"
        file.write_bytes(http_request("/v1/completions", "none", b'{"model": "base", "prompt": 5}'))
        command = sender(url.host, url.port or 80, str(file), way, 2, 0.5)
        delivered = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=100).stdout)
    assert set(delivered) == {seen}
    assert engine.submitted == []


def test_the_row_of_an_attack_has_every_column_but_its_name_and_the_others_share() -> None:
    found = Found(
        Watched([0.1], [0.01], [0.002]), Watched([0.15], [0.03], [0.004]), before=2**20, after=3 * 2**20
    )
    assert len(found.row()) == len(COLUMNS) - 2
    assert found.row()[:5] == ["100 / 150", "100 / 150", "1.50", "10 / 30", "2 / 4"]
    assert found.kept == 2


def test_a_tenant_that_got_nothing_at_all_is_no_better_than_one_that_waited() -> None:
    found = Found(Watched([0.1], [0.01], [0.002]))
    assert found.row()[1] == "100 / inf"
    assert found.ratio == float("inf")
    assert p99([0.3, 0.1, 0.2]) == 0.3


def test_each_tenant_has_a_key_and_no_limits_of_its_own(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "data")
    assert len(set(keys.values())) == len(keys) == 2
