"""A whole server over an engine that says what a test planted, for the console to show."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from live_server import serving
from msgspec.structs import replace
from uploads import BOUNDS

from personae.actors.client import EngineStats, ModelCard, QueueStats
from personae.api.adapters.registry import Registry
from personae.api.app import create_app
from personae.api.batches.manager import BatchManager
from personae.api.settings import ApiSettings
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.engine.stats import StepSample
from personae.evals.harness.records import Head, Log, OutcomeRecord

DIGEST = "d" * 64


class NamedAdapter(FakeEngine):
    """Its adapter has a name that a test wants."""

    name = "poet"

    def models(self, tenant: str) -> dict[str, ModelCard]:
        """The base and one adapter."""
        cards = super().models(tenant)
        adapter = cards.pop("team/pirate")
        return {**cards, self.name: replace(adapter, name=self.name)}


def busy(tenant: str) -> EngineStats:
    """An engine that restarted, with steps of each kind and a queue."""
    steps = [
        StepSample(1 + at // 60, 8, 8 + 90 * (at % 9 == 0), 0.02 + 0.001 * (at % 7), 0.002)
        for at in range(120)
    ]
    return EngineStats(
        running=3,
        waiting=1,
        pages_total=100,
        pages_used=40,
        pages_lent=10,
        restarts=1,
        queues=(QueueStats(tenant, DIGEST, 2, 1, 900), QueueStats("default", None, 1, 0, 300)),
        recent_steps=tuple(steps),
    )


def plant_run(folder: Path, name: str, text: str) -> None:
    """A run of an evaluation, in which `text` stands everywhere."""
    head = Head(
        name=text,
        target=text,
        suites={"demo": {}},
        tasks={},
        models=["base"],
        sampling={},
        version="1",
        started="2026-11-23 12:00:00 UTC",
    )
    with Log(folder / name, head) as log:
        for number in range(4):
            log.add(
                [
                    OutcomeRecord(
                        suite="demo",
                        task=text,
                        case=f"{number}",
                        model="base",
                        mode="free",
                        passed=number % 2 == 0,
                        scores={"valid": 0.5},
                        prompt=text,
                        answer=text,
                        seconds=0.25,
                    )
                ]
            )
        log.end(1.5, complete=True)
    page = f"<script>window.broken = true</script>{text}"
    (folder / name / "report.html").write_text(page, encoding="utf-8")


@contextmanager
def planted_console(
    path: Path, engine: FakeEngine, reports: Path | None = None, scaler: Any = None
) -> Iterator[str]:
    """Serve the engine while the block runs, with all that the console has tabs for; gives the URL."""
    settings = ApiSettings(eval_reports=reports)
    models = engine.models("default")
    with (
        closing(DataDir(path)) as data,
        closing(Registry(data, next(iter(models)), set(models), BOUNDS)) as registry,
        closing(BatchManager(data)) as batches,
    ):
        app = create_app(
            engine,
            settings,
            tenants=TenantStore(data),
            registry=registry,
            batches=batches,
            usage=UsageLedger(data),
            scaler=scaler,
        )
        with serving(app, settings, batches.running(app.state.services)) as url:
            yield url
