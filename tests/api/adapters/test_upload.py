"""Multipart bodies, as clients and others write them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asgi
import httpx
import pytest
from uploads import CONFIG, TENSORS, UploadFixture, open_fixture, upload, whole

from personae.api.settings import ApiSettings

# Not on trio: there httpx leaves a body that was refused halfway to the garbage collector, which warns.
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
BOUNDARY = "frontier"
SETTINGS = ApiSettings(max_upload_bytes=4000)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path, settings=SETTINGS) as fixture:
        yield fixture


def part(name: str, content: bytes, extra: str = "", filename: str | None = "x") -> bytes:
    given = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{given}\r\n{extra}\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes, end: bytes = b"--frontier--\r\n") -> bytes:
    return b"".join(parts) + end


def good() -> list[bytes]:
    return [part("name", b"poet", filename=None), *(part(name, data) for name, data in whole().items())]


async def post(
    fixture: UploadFixture,
    body: bytes | AsyncIterator[bytes],
    kind: str = f"multipart/form-data; boundary={BOUNDARY}",
) -> httpx.Response:
    async with fixture.client() as client:
        return await client.post("/v1/adapters", content=body, headers={"content-type": kind})


async def test_a_form_may_come_in_any_order_and_in_pieces_of_any_size(fixture: UploadFixture) -> None:
    body = form(*reversed(good()))
    for number, size in enumerate((1, 7, 4096)):

        async def pieces(size: int = size) -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        response = await post(fixture, pieces())
        assert response.status_code == (201 if number == 0 else 409), response.text
    assert fixture.leftovers() == []


FORMS = {
    "no end": (form(*good(), end=b""), "closing boundary"),
    "nothing": (b"", "closing boundary"),
    "not a form": (b"{}" * 50, "not a valid multipart form"),
    "other boundary": (form(*good()).replace(b"frontier", b"elsewhere"), "not a valid multipart form"),
    "twice": (form(*good(), part("name", b"two", filename=None)), "twice"),
    "file twice": (form(*good(), part(CONFIG, b"{}")), "twice"),
    "unknown": (form(*good(), part("path", b"/etc", filename=None)), "not a field"),
    "no name": (form(b"--frontier\r\nContent-Disposition: form-data\r\n\r\nx\r\n", *good()), "no name"),
    "no headers": (form(b"--frontier\r\n\r\nx\r\n", *good()), "no name"),
    "many headers": (form(part("name", b"a", "x: y\r\n" * 50)), "not a valid multipart form"),
    "long header": (form(part("name", b"a", f"x: {'y' * 9000}\r\n")), "not a valid multipart form"),
    "encoded": (form(part("name", b"YQ==", "Content-Transfer-Encoding: base64\r\n")), "encoding"),
    "long text": (form(part("name", b"a" * 300, filename=None)), "more than 256"),
    "not UTF-8": (form(*good()[1:], part("name", b"\xff", filename=None)), "not UTF-8"),
    "no tensors": (form(*good()[:2]), f"`{TENSORS}` is required"),
    "no name field": (form(*good()[1:]), "`name` is required"),
    "large config": (form(part(CONFIG, b" " * (2**20 + 1))), "more than 1MiB"),
    "large tensors": (form(part(TENSORS, b" " * 4001)), "more than 3.9KiB"),
    "bad flag": (form(*good(), part("replace", b"yes", filename=None)), "true or false"),
    "other base": (form(*good(), part("base_model", b"gpt", filename=None)), "base model here is `base`"),
}


@pytest.mark.parametrize("case", FORMS)
async def test_forms_that_are_refused(fixture: UploadFixture, case: str) -> None:
    body, reason = FORMS[case]
    response = await post(fixture, body)
    assert 400 <= response.status_code < 500
    assert reason in response.json()["error"]["message"]
    assert fixture.leftovers() == []
    assert fixture.registry.list("default") == []


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=a",
        "",
        f"multipart/form-data; boundary={'b' * 300}",
    ],
)
async def test_bodies_of_another_kind_are_refused(fixture: UploadFixture, kind: str) -> None:
    assert (await post(fixture, form(*good()), kind)).status_code == 400
    assert fixture.leftovers() == []


@pytest.mark.parametrize("filename", ["../../../etc/cron.d/x", "/tmp/x", "a\\0", "x.pt"])
async def test_file_names_are_never_used(fixture: UploadFixture, filename: str) -> None:
    files = [part(name, data, filename=filename) for name, data in whole().items()]
    assert (await post(fixture, form(good()[0], *files))).status_code == 201
    inside = {path.name for path in fixture.data.adapters.rglob("*") if path.is_file()}
    assert inside == {CONFIG, TENSORS}


async def test_a_client_that_leaves_halfway_leaves_nothing(fixture: UploadFixture) -> None:
    kind = (b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())
    visit = asgi.Visit("/v1/adapters")
    visit._request_headers = [kind]
    visit.say(form(*good())[:500], more=True)
    visit.leave()
    await visit.run(fixture.app)
    assert fixture.leftovers() == []


async def test_a_body_over_the_limit_is_refused_by_its_length_and_the_connection_closed(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        response = await upload(client, "x", {CONFIG: b"{}", TENSORS: bytes(4 * 2**20)})
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
