"""What the console's pages cost the browser with many tenants and adapters, and how they look.

    python -m personae.evals.console_pages --tenants 300 --adapters 100 [--pictures DIR] [--axe axe.min.js]

Serves the bundled small model with a month of usage, a batch and an evaluation, while some tenants ask, and
opens each page in Chromium. Prints for each page the processor time of its main thread: of scripts, of
styles and layout, and of all its tasks, when the page is opened and for one poll. With `--pictures` each page
is also saved at 1400 and 390 pixels, and with `--axe` searched for faults of accessibility. Exit code 1 if
the scripts of a page take more than `--most` ms, or if it has a serious fault.

The month of usage is made up, except for its last hour. All the rest is what the server did.
"""

import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer

from personae.api.bundled import DEMO, NAMED
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity, TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.administration import command, write
from personae.evals.tenants.making import AdapterMaker

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

DAY = 86400
PATIENCE = 120.0  # seconds, of a machine that has much else to do
SCREENS = {"": (1400, 1000), "-phone": (390, 844)}
STREAMS = 6  # that ask all the time
QUESTION = "Write two lines about the sea."
SCHEMA = {"type": "array", "items": {"type": "string", "pattern": r"^(ab)\1$"}, "minItems": 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor milliseconds of a page's main thread."""

    script: float
    layout: float
    tasks: float

    @classmethod
    def read(cls, session: "CDPSession") -> "Cost":
        """What the page has used until now."""
        said = session.send("Performance.getMetrics")["metrics"]
        seconds = {one["name"]: one["value"] for one in said}
        layout = seconds["LayoutDuration"] + seconds["RecalcStyleDuration"]
        return cls(1e3 * seconds["ScriptDuration"], 1e3 * layout, 1e3 * seconds["TaskDuration"])

    def since(self, before: "Cost") -> "Cost":
        """What was used after `before`."""
        return Cost(self.script - before.script, self.layout - before.layout, self.tasks - before.tasks)

    @classmethod
    def median(cls, costs: list["Cost"]) -> "Cost":
        """The median of each number."""
        return cls(
            statistics.median(one.script for one in costs),
            statistics.median(one.layout for one in costs),
            statistics.median(one.tasks for one in costs),
        )

    def __str__(self) -> str:
        """As a part of a row of a table."""
        return f"{self.script:.1f} | {self.layout:.1f} | {self.tasks:.1f}"


@dataclass(frozen=True, slots=True)
class View:
    """A page: the tab's address, what it has when it has been drawn, what is done there, and the route that
    the page polls, if any. `picture` follows `console-` in the name of its file."""

    picture: str
    tab: str
    drawn: str
    act: Callable[["Page"], None]
    polls: str | None = None
    screens: tuple[str, ...] = tuple(SCREENS)


def _chat(page: "Page") -> None:
    page.get_by_label("Token probabilities").check()
    page.get_by_label("Most tokens").fill("80")
    page.get_by_label("Temperature").fill("0")
    wide = page.evaluate("innerWidth") > 1000
    if wide:
        page.get_by_role("button", name="Compare").click()
        page.get_by_label("Model of column 2").select_option("verse")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".summary").nth(1 if wide else 0).wait_for()
    if wide:
        page.get_by_label("Bound by").select_option("schema")
        page.get_by_label("JSON Schema", exact=True).fill(json.dumps(SCHEMA, indent=1))
        page.locator("tr.refused").first.wait_for()
        page.get_by_label("Tokens with probabilities").first.focus()
        page.keyboard.press("ArrowRight")
        page.locator(".chances").wait_for()
    else:
        page.evaluate("scrollTo(0, 0)")


def _live(page: "Page") -> None:
    page.get_by_label("Charts show").select_option("now")
    for _ in range(12):
        with page.expect_response(lambda answer: answer.url.endswith("/v1/stats")):
            pass


def _adapters(page: "Page") -> None:
    page.get_by_label("Find by name or tenant").fill("voice-7")
    page.get_by_role("heading", name="voice-7", exact=True).click()
    page.get_by_text("in the last 30 days").first.wait_for()


def _tenants(page: "Page") -> None:
    page.get_by_role("button", name="Tokens").click()


def _usage(page: "Page") -> None:
    page.get_by_label("Find by name", exact=True).fill("tenant-007")
    page.get_by_role("button", name="tenant-007").click()
    card = page.get_by_role("article", name="tenant-007")
    card.get_by_role("img", name="Spend a day").wait_for()


def _evals(page: "Page") -> None:
    run = page.get_by_label("Evaluations").locator("details.struct").first
    run.locator("summary").first.click()
    run.get_by_role("heading", name="demo").wait_for()
    page.get_by_label("Evaluations").evaluate("e => scrollTo(0, e.offsetTop)")


def _docs(page: "Page") -> None:
    path = page.locator(".operation").get_by_text("/v1/chat/completions", exact=True).first
    path.click()
    page.get_by_text("ChatRequest").first.wait_for()
    path.evaluate("e => scrollTo(0, e.getBoundingClientRect().top - 60)")


ROWS = "[aria-label='All tenants'] tbody tr"
VIEWS = {
    "Playground": View("playground", "playground", ".column", _chat),
    "Live": View("live", "live", ".chart canvas", _live, "/v1/stats"),
    "Adapters": View("adapters", "adapters", ".adapter", _adapters),
    "Tenants": View("tenants", "tenants", ROWS, _tenants),
    "Tenants, one opened": View("usage", "tenants", ROWS, _usage, screens=("",)),
    "Batches and evals": View("evals", "batches", "details.struct", _evals, "/v1/batches"),
    "API": View("api", "docs", ".operation", _docs),
}


class PopulatedServer:
    """A served model with tenants, adapters, usage, a batch and an evaluation."""

    def __init__(self, folder: Path, tenants: int, adapters: int) -> None:
        self._folder = folder
        self._adapters = adapters
        self._tenants = [f"tenant-{number:03d}" for number in range(tenants)]
        data = folder / "data"
        command("tenants", "create", "root", "--data-dir", str(data))
        self.key = command("keys", "create", "root", "--admin", "--data-dir", str(data)).strip()
        lines = [json.dumps({"name": name, "limits": {"concurrent": 8}}) for name in self._tenants]
        (folder / "tenants.jsonl").write_text("\n".join(lines))
        made = command("tenants", "import", str(folder / "tenants.jsonl"), "--keys", "--data-dir", str(data))
        self._keys = [json.loads(line)["key"] for line in made.splitlines() if line.startswith("{")]
        self._make_usage(data)
        (folder / "runs").mkdir()
        self.arguments = [str(NAMED), "--data-dir", str(data), "--eval-reports", str(folder / "runs")]
        self.arguments += ["--price", "*=20/60"]

    def _make_usage(self, folder: Path) -> None:
        """Four requests or more of each tenant on each of the 29 days before today."""
        dice = random.Random(0)
        today = int(time.time()) // DAY * DAY
        data = DataDir(folder)
        names = {one.tenant: one.id for one in TenantStore(data).list_keys()}
        for day in range(today - 29 * DAY, today, DAY):
            ledger = UsageLedger(data, clock=lambda day=day: day + DAY / 2)  # type: ignore[misc]
            for number, tenant in enumerate(self._tenants):
                for turn in range(4):
                    voice = 4 * (number % (self._adapters // 4)) + turn
                    tokens = dice.randrange(2000), dice.randrange(1000)
                    who = Identity(tenant, "tenant", key=names[tenant])
                    spend = (20 * tokens[0] + 60 * tokens[1]) / 1e6
                    ledger.add(who, f"voice-{voice}@1", tokens[0], 0, tokens[1], 2.0, spend)
            ledger.flush()
        data.close()

    def push(self, url: str) -> None:
        """All adapters, by one command."""
        maker = AdapterMaker(DEMO / "model")
        for number in range(self._adapters):
            write(self._folder / "adapters" / f"voice-{number}", maker.make(4, number))
        every = [str(path) for path in sorted((self._folder / "adapters").iterdir())]
        command("adapters", "push", *every, "--shared", "--url", url, "--key", self.key)

    def run_batch_and_evaluation(self, url: str) -> None:
        """Start both, and wait until they have ended."""
        lines = [
            json.dumps(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "model": f"voice-{number}",
                        "messages": [{"role": "user", "content": f"{number}?"}],
                        "max_completion_tokens": 8,
                    },
                }
            )
            for number in range(20)
        ]
        with self.client(url) as client:
            file = {"file": ("requests.jsonl", "\n".join(lines))}
            answer = client.post("/v1/files", data={"purpose": "batch"}, files=file).raise_for_status()
            batch = {
                "input_file_id": answer.json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "metadata": {"name": "nightly"},
            }
            id = client.post("/v1/batches", json=batch).raise_for_status().json()["id"]
            run = {"suites": ["demo"], "models": ["base"], "count": 2, "name": "nightly"}
            report = client.post("/v1/eval_reports", json=run).raise_for_status().json()["id"]
            while client.get(f"/v1/batches/{id}").raise_for_status().json()["status"] != "completed":
                time.sleep(1)
            while client.get(f"/v1/eval_reports/{report}").raise_for_status().json()["running"]:
                time.sleep(1)

    def client(self, url: str) -> httpx.Client:
        """A client with the admin's key."""
        return httpx.Client(base_url=url, timeout=PATIENCE, headers={"authorization": f"Bearer {self.key}"})

    @contextmanager
    def asking(self, url: str) -> Iterator[None]:
        """Some tenants ask while the block runs."""
        over = threading.Event()

        def ask(seed: int) -> None:
            dice = random.Random(seed)
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                while not over.is_set():
                    voice = f"voice-{dice.randrange(self._adapters)}"
                    words = dice.choices(("sea", "ship", "wind", "night"), k=dice.randrange(5, 60))
                    body = {"model": voice, "prompt": " ".join(words), "max_tokens": dice.randrange(4, 40)}
                    headers = {"authorization": f"Bearer {dice.choice(self._keys)}"}
                    client.post("/v1/completions", json=body, headers=headers).raise_for_status()
                    over.wait(dice.random())

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


class Pages:
    """Opens the console's pages, each in a browser context of its own."""

    def __init__(self, browser: "Browser", url: str, key: str) -> None:
        self._browser = browser
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}

    @contextmanager
    def opened(self, view: View, width: int, height: int) -> Iterator[tuple["Page", "CDPSession"]]:
        """The page when it has all its answers, and a session that says what it costs."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, extra_http_headers=self._headers
        )
        page = context.new_page()
        page.set_default_timeout(1e3 * PATIENCE)
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(f"{self._url}/#{view.tab}")
        page.locator(view.drawn).first.wait_for()
        page.wait_for_load_state("networkidle")
        yield page, session
        context.close()

    def cost(self, view: View) -> tuple[Cost, Cost | None]:
        """Of opening the page, and of a poll."""
        with self.opened(view, *SCREENS[""]) as (page, session):
            opened = Cost.read(session)
            if view.polls is None:
                return opened, None
            with page.expect_response(lambda answer: answer.url.partition("?")[0].endswith(view.polls or "")):
                pass
            page.wait_for_timeout(300)
            return opened, Cost.read(session).since(opened)

    def look(self, view: View, screen: str, picture: Path | None, axe: Path | None) -> list[str]:
        """Save a picture of the page, and search it for serious faults; both where asked for."""
        with self.opened(view, *SCREENS[screen]) as (page, _):
            view.act(page)
            page.wait_for_timeout(500)
            if picture is not None:
                save(page, picture / f"console-{view.picture}{screen}.png")
            if axe is None:
                return []
            page.evaluate(axe.read_text(encoding="utf-8"))
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            return [
                f"{one['id']} at {node['target']}"
                for one in found["violations"]
                if one["impact"] in ("serious", "critical")
                for node in one["nodes"]
            ]


def save(page: "Page", file: Path) -> None:
    """A picture of what is visible, with 48 colors."""
    from PIL import Image

    page.screenshot(path=file, animations="disabled")
    with Image.open(file) as shown:
        small = shown.convert("RGB").quantize(48, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def main(
    tenants: Annotated[int, typer.Option(min=10)] = 300,
    adapters: Annotated[int, typer.Option(min=20)] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="How often each page is opened; medians are shown.")] = 5,
    most: Annotated[float, typer.Option(help="Most ms of scripts of a page.")] = 100.0,
    pictures: Annotated[Path | None, typer.Option(help="A folder for pictures of the pages.")] = None,
    axe: Annotated[Path | None, typer.Option(help="axe.min.js of axe-core.")] = None,
) -> None:
    """Run it."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    wrong: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        populated = PopulatedServer(folder, tenants, adapters)
        server = stack.enter_context(Served(populated.arguments, folder / "log"))
        populated.push(server.url)
        populated.run_batch_and_evaluation(server.url)
        stack.enter_context(populated.asking(server.url))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        stack.callback(browser.close)
        pages = Pages(browser, server.url, populated.key)
        print(f"{tenants} tenants, {adapters} adapters; processor ms of the main thread, medians of {repeat}")
        print("| page | opened: scripts | styles, layout | all | a poll: scripts | styles, layout | all |")
        print("|---|---|---|---|---|---|---|")
        for name, view in VIEWS.items():
            if view.act is _usage:
                continue  # the tab is measured already
            costs = [pages.cost(view) for _ in range(repeat)]
            opened = Cost.median([one for one, _ in costs])
            polls = [poll for _, poll in costs if poll is not None]
            print(f"| {name} | {opened} | {Cost.median(polls) if polls else '– | – | –'} |", flush=True)
            if opened.script > most:
                wrong.append(f"{name}: its scripts take {opened.script:.0f} ms")
        for name, view in VIEWS.items():
            for screen in view.screens if pictures or axe else ():
                wrong += [f"{name}{screen}: {fault}" for fault in pages.look(view, screen, pictures, axe)]
    for text in wrong:
        print(f"NOT SO: {text}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
