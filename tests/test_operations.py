"""docs/operate/operations.md and the Grafana dashboard, against a scrape of a server that has served
something."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, eventually
from prometheus_client.parser import text_string_to_metric_families
from real_server import running

from personae.api.bundled import NAMED
from personae.api.options import ServeOptions
from personae.api.telemetry.write_metrics import WriteFailureCollector
from personae.api.tenants.flusher import WriteFailures
from personae.api.tenants.store import TenantLimits

DOCS = Path(__file__).resolve().parent.parent / "docs"
METRIC = re.compile(r"\b(?:vllm|personae):[a-z_0-9]+")
MADE = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def scraped() -> dict[str, list[Any]]:
    """Samples by name, after one request of each route that generates."""
    with running(ServeOptions(NAMED, device="cpu", tenant_metrics=1)) as server:
        model = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
        for path, body in (
            ("completions", {"prompt": "Once"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ):
            asked = {"model": model, "max_tokens": 4, "ignore_eos": True, **body}
            assert httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=PATIENCE).status_code == 200

        def scrape() -> str:
            return httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text

        waiting = re.compile(r"mailbox_depth\{.*\} [1-9]")
        eventually(lambda: not waiting.search(scrape()), "what the last answer left in a mailbox is taken")
        text = scrape()
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        if not family.samples:  # nothing has been counted yet
            samples[f"{family.name}_total" if family.type == "counter" else family.name] = []
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples.setdefault(sample.name, []).append(sample)
    return samples


def expressions() -> list[str]:
    dashboard = json.loads((DOCS / "operate" / "grafana" / "personae.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_every_metric_of_the_dashboard_is_in_the_scrape(scraped: dict[str, list[Any]]) -> None:
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(used) > 25
    assert used - scraped.keys() == set()


def test_every_label_that_the_dashboard_groups_by_is_there(scraped: dict[str, list[Any]]) -> None:
    for expression in expressions():
        for labels in re.findall(r"by \((\w+)\)", expression):
            (name, *_) = METRIC.findall(expression)
            if labels != "instance":  # which Prometheus adds
                assert all(labels in sample.labels for sample in scraped[name]), expression


def test_the_table_has_every_metric_and_no_other(scraped: dict[str, list[Any]]) -> None:
    page = (DOCS / "operate" / "operations.md").read_text(encoding="utf-8")
    table = {name for line in page.splitlines() if line.startswith("| `") for name in METRIC.findall(line)}
    failures = WriteFailures()
    failures.add("usage")
    [with_data] = WriteFailureCollector(failures).collect()  # of a server with a data directory
    assert table == {MADE.sub("", name) for name in scraped} | {f"{with_data.name}_total"}


def test_the_figures_are_of_what_was_served(scraped: dict[str, list[Any]]) -> None:
    def value(name: str, **labels: str) -> float:
        found = [s.value for s in scraped[name] if labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels)
        return float(found[0])

    assert value("vllm:generation_tokens_total") == 8
    assert value("vllm:request_generation_tokens_sum") == 8
    for part in ("queue", "prefill", "decode", "inference"):
        assert value(f"vllm:request_{part}_time_seconds_count") == 2
    prefill, decode = (value(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
    assert value("vllm:request_inference_time_seconds_sum") == pytest.approx(prefill + decode)
    assert value("personae:step_tokens_total") >= 8
    spent = {part: value("personae:step_part_seconds_total", part=part) for part in ("forward", "sample")}
    assert 0 < spent["forward"] <= value("personae:step_seconds_total")
    for actor in ("personae/frontend/ingress", "core/scheduler", "personae/frontend/queue"):
        assert value("personae:mailbox_depth", actor=actor) == 0
    assert value("personae:ready") == 1


def test_the_page_about_administration_names_every_limit() -> None:
    page = (DOCS / "operate" / "administration.md").read_text(encoding="utf-8")
    listed = page.partition("The limits are those of")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`", listed)) == set(TenantLimits.__struct_fields__)
