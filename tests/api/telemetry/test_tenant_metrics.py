"""Tenants in `/metrics`: which have series of their own, and what these count."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.api.telemetry.tenant_metrics import OTHER, TenantMetrics
from personae.api.tenants.store import TenantLimits

pytestmark = pytest.mark.anyio
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def scrape(tmp_path: Path, most: int) -> dict[tuple[str, str], float]:
    """What `/metrics` says of tenants, by name and label, after ann, ben and cat asked in this order."""
    with open_fixture(tmp_path) as fixture:
        settings = ApiSettings(tenant_metrics=most)
        fixture.app = create_app(fixture.engine, settings, tenants=fixture.tenants, registry=fixture.registry)
        keys = {name: fixture.key(name) for name in ("ann", "ben", "cat")}
        fixture.tenants.change_limits("ben", TenantLimits(requests_per_minute=1))
        for name, times in (("ann", 2), ("ben", 2), ("cat", 1)):
            async with fixture.client(keys[name]) as client:
                for _ in range(times):
                    await client.post("/v1/chat/completions", json=CHAT)
        async with fixture.client(fixture.key("root", "admin")) as admin:
            text = (await admin.get("/metrics")).text
    return {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("personae:tenant_") and not sample.name.endswith(("_bucket", "_created"))
    }


async def test_each_tenant_has_its_requests_tokens_and_refusals(tmp_path: Path) -> None:
    found = await scrape(tmp_path, 8)
    requests = {name: found["personae:tenant_requests_total", name] for name in ("ann", "ben", "cat")}
    assert requests == {"ann": 2, "ben": 1, "cat": 1}
    assert found["personae:tenant_rate_limited_total", "ben"] == 1
    assert ("personae:tenant_rate_limited_total", "ann") not in found
    assert found["personae:tenant_generation_tokens_total", "ann"] == 8
    assert found["personae:tenant_prompt_tokens_total", "ann"] == (
        2 * found["personae:tenant_prompt_tokens_total", "cat"]
    )
    assert found["personae:tenant_time_to_first_token_seconds_count", "ann"] == 2


async def test_tenants_beyond_the_bound_share_a_label(tmp_path: Path) -> None:
    found = await scrape(tmp_path, 1)
    assert {tenant for _, tenant in found} == {"ann", OTHER}
    assert found["personae:tenant_requests_total", OTHER] == 2


async def test_without_the_option_no_series_names_a_tenant(tmp_path: Path) -> None:
    assert await scrape(tmp_path, 0) == {}


def test_ten_thousand_tenants_make_no_more_series_than_allowed() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry, 5, (1.0,))
    for number in range(10_000):
        metrics.ended(f"t{number}", prompt=1, cached=0, completion=1)
    [family] = [one for one in registry.collect() if one.name == "personae:tenant_requests"]
    totals = [sample.value for sample in family.samples if sample.name.endswith("_total")]
    assert len(totals) == 6
    assert sum(totals) == 10_000
