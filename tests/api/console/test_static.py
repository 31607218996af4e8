"""The console's files: strict headers, no key needed, nothing that could turn text into HTML."""

import hashlib
import re

import asgi
import pytest
from fake_engine import FakeEngine

from personae.api.app import create_app
from personae.api.console.pages import STATIC
from personae.api.settings import ApiSettings

OWN = sorted(file for file in STATIC.iterdir() if file.suffix in (".js", ".html", ".css", ".svg"))
UNSAFE = (
    r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function"
    r"|document\.cookie|javascript:|https?://(?!www\.w3\.org/2000/svg)"
)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/", "/console", "/docs", "/console/app.js", "/console/console.css"])
async def test_pages_come_with_a_policy_that_allows_no_inline_script(path: str) -> None:
    async with asgi.client(create_app(FakeEngine())) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "name", ["nothing.js", "README.md", "LICENSE-htm.txt", "..%2fpages.py", "%2e%2e/pages.py", ".."]
)
async def test_only_the_consoles_own_files_are_sent(name: str) -> None:
    async with asgi.client(create_app(FakeEngine())) as client:
        answer = await client.get(f"/console/{name}")
    assert answer.status_code in (404, 401, 200)
    assert "from personae" not in answer.text
    assert answer.status_code == 404 or answer.headers["content-type"].startswith("text/html")


@pytest.mark.anyio
async def test_the_page_is_found_below_a_proxys_prefix() -> None:
    async with asgi.client(create_app(FakeEngine(), ApiSettings(root_path="/llm"))) as client:
        for path in ("/llm/", "/llm/console"):
            assert '<base href="/llm/" />' in (await client.get(path)).text


def test_only_conversations_are_kept_in_the_browser_and_their_file_knows_no_key() -> None:
    keeping = [file for file in OWN if re.search("(local|session)Storage", file.read_text(encoding="utf-8"))]
    assert [file.name for file in keeping] == ["conversations.js"]
    assert "import { html } from" in keeping[0].read_text(encoding="utf-8")
    assert keeping[0].read_text(encoding="utf-8").count("import") == 1


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_no_file_makes_html_of_text_keeps_a_secret_or_names_another_site(file: object) -> None:
    assert re.search(UNSAFE, file.read_text(encoding="utf-8")) is None


def test_the_page_has_no_inline_script_or_style() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=", page) is None


def test_what_is_vendored_is_what_its_table_says() -> None:
    table = (STATIC / "vendor" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` .*`([0-9a-f]{64})` \|$", table, re.MULTILINE)
    vendored = {file.name for file in (STATIC / "vendor").iterdir() if file.suffix in (".js", ".css")}
    assert {name for name, _ in rows} == vendored
    for name, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
