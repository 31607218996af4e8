"""Uploads that are not what they should be, a few hundred of them: each is refused with a reason and leaves
nothing behind, and what is accepted is right by another reader's judgement too."""

import asyncio
import json
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from safetensors.torch import load, save
from uploads import (
    BOUNDS,
    CONFIG,
    SHAPES,
    TENSORS,
    UploadFixture,
    config,
    open_fixture,
    raw_safetensors,
    tensors,
    upload,
    whole,
)

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
NAMES = sorted(tensors())
FIRST = NAMES[0]
odd_text = st.text(st.characters(codec=None, exclude_categories=[]), max_size=20)
odd_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path_factory.mktemp("fixture")) as fixture:
        yield fixture
        asyncio.run(a_good_one_is_taken(fixture))


async def a_good_one_is_taken(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        assert (await upload(client, "good", whole())).status_code == 201
        assert (await client.delete("/v1/adapters/good")).status_code == 200


def send(fixture: UploadFixture, files: dict[str, bytes], name: str = "x", **fields: str) -> httpx.Response:
    async def one() -> httpx.Response:
        async with fixture.client() as client:
            return await upload(client, name, files, **fields)

    return asyncio.run(one())


def refused(fixture: UploadFixture, response: httpx.Response) -> str:
    """The reason."""
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert str(fixture.data.path) not in response.text, "no path of the server is shown"
    nothing_is_left(fixture)
    message: str = error["message"]
    return message


def nothing_is_left(fixture: UploadFixture) -> None:
    assert fixture.leftovers() == []
    assert fixture.registry.list("default") == []


def header_and_data() -> tuple[dict[str, Any], bytes]:
    file = save(tensors())
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


@quick
@given(st.data())
def test_truncated(fixture: UploadFixture, data: st.DataObject) -> None:
    files = whole()
    broken = data.draw(st.sampled_from([CONFIG, TENSORS]))
    files[broken] = files[broken][: data.draw(st.integers(0, len(files[broken]) - 1))]
    refused(fixture, send(fixture, files))


@quick
@given(st.integers(0, 2**64 - 1))
@example(2**64 - 1)
@example(2**63)
@example(0)
def test_a_header_length_that_lies(fixture: UploadFixture, length: int) -> None:
    header, data = header_and_data()
    file = raw_safetensors(header, data, length)
    if length != len(json.dumps(header).encode()):
        refused(fixture, send(fixture, {CONFIG: config(), TENSORS: file}))


@quick
@given(st.data())
def test_offsets_that_overlap_leave_gaps_or_point_elsewhere(
    fixture: UploadFixture, data: st.DataObject
) -> None:
    header, content = header_and_data()
    entry = header[data.draw(st.sampled_from(NAMES))]
    right = list(entry["data_offsets"])
    entry["data_offsets"] = data.draw(
        st.lists(st.integers(-(2**65), 2**65) | st.integers(-8, 600), min_size=1, max_size=3)
        | st.sampled_from([[right[0], True], [0, right[1] - right[0]], [1.0, 2.0], ["0", "64"], None, {}])
    )
    if entry["data_offsets"] != right:
        refused(fixture, send(fixture, {CONFIG: config(), TENSORS: raw_safetensors(header, content)}))


@quick
@given(st.sampled_from(NAMES), st.sampled_from(["dtype", "shape", "data_offsets", None, "more"]), odd_json)
def test_headers_that_say_anything(fixture: UploadFixture, name: str, field: str | None, value: Any) -> None:
    header, content = header_and_data()
    if field is None:
        header[name] = value
    else:
        unchanged = header[name].get(field) == value and type(header[name].get(field)) is type(value)
        header[name][field] = value
        if unchanged:
            return
    refused(fixture, send(fixture, {CONFIG: config(), TENSORS: raw_safetensors(header, content)}))


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"\xff\xfe{}", b"null", b"{" + b" " * 9]
)
def test_headers_that_are_no_objects(fixture: UploadFixture, text: bytes) -> None:
    refused(fixture, send(fixture, {CONFIG: config(), TENSORS: raw_safetensors(text, b"")}))
    refused(fixture, send(fixture, {CONFIG: text, TENSORS: save(tensors())}))


def test_a_tensor_that_stands_twice_in_the_header(fixture: UploadFixture) -> None:
    header, content = header_and_data()
    text = json.dumps(header)
    twice = text[:-1] + f", {json.dumps(FIRST)}: {json.dumps(header[FIRST])}}}"
    message = refused(
        fixture, send(fixture, {CONFIG: config(), TENSORS: raw_safetensors(twice.encode(), content)})
    )
    assert "twice" in message


@quick
@given(
    st.sampled_from(NAMES),
    st.integers(0, 15),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_single_value_that_is_not_finite(
    fixture: UploadFixture, name: str, place: int, value: float, dtype: torch.dtype
) -> None:
    found = {key: tensor.to(dtype) for key, tensor in tensors().items()}
    found[name].view(-1)[place % found[name].numel()] = value
    message = refused(fixture, send(fixture, {CONFIG: config(), TENSORS: save(found)}))
    assert "not finite" in message
    assert name in message


@quick
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([torch.float32, torch.int8, torch.float64]),
)
def test_wrong_shapes_and_dtypes(
    fixture: UploadFixture, name: str, shape: list[int], dtype: torch.dtype
) -> None:
    found = tensors()
    if found[name].shape == torch.Size(shape) and dtype == torch.float32:
        return
    found[name] = torch.zeros(shape, dtype=dtype)
    assert name in refused(fixture, send(fixture, {CONFIG: config(), TENSORS: save(found)}))


@quick
@given(st.integers(-(2**66), 2**66) | st.floats() | st.booleans() | odd_text)
@example(BOUNDS.max_rank + 1)
@example(0)
@example(2**16)
def test_ranks_that_are_not_the_tensors(fixture: UploadFixture, rank: Any) -> None:
    if type(rank) is not int or rank != 2:
        refused(fixture, send(fixture, {CONFIG: config(r=rank), TENSORS: save(tensors())}))


def test_a_rank_that_the_servers_memory_cannot_hold(fixture: UploadFixture) -> None:
    big = BOUNDS.max_rank + 1
    assert "--adapter-memory" in refused(fixture, send(fixture, whole(rank=big)))


def test_values_that_the_servers_precision_cannot_hold(fixture: UploadFixture) -> None:
    found = {name: tensor * 1e5 for name, tensor in tensors().items()}
    assert "range" in refused(fixture, send(fixture, {CONFIG: config(), TENSORS: save(found)}))


@quick
@given(
    odd_text
    | st.sampled_from(["../../etc/passwd", "a\0b", "/", "base_model", "a" * 300, "\ud800", FIRST + " "])
)
def test_tensors_of_other_names(fixture: UploadFixture, name: str) -> None:
    header, content = header_and_data()
    header[name] = header.pop(FIRST)
    refused(fixture, send(fixture, {CONFIG: config(), TENSORS: raw_safetensors(header, content)}))


@pytest.mark.parametrize("count", [1, 3])
def test_missing_tensors(fixture: UploadFixture, count: int) -> None:
    found = tensors()
    for name in NAMES[:count]:
        del found[name]
    assert "missing" in refused(fixture, send(fixture, {CONFIG: config(), TENSORS: save(found)}))


@quick
@given(st.text(st.characters(codec="ascii"), min_size=1, max_size=12), odd_json)
@example("use_dora", True)
@example("modules_to_save", ["lm_head"])
@example("auto_mapping_x", {"a": 1})
@example("\0", 1)
def test_config_fields_that_would_be_ignored(fixture: UploadFixture, field: str, value: Any) -> None:
    known = {"r", "lora_alpha", "peft_type", "task_type", "bias", "revision"}
    if value and field not in known:
        refused(fixture, send(fixture, {CONFIG: config(**{field: value}), TENSORS: save(tensors())}))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


@pytest.mark.parametrize(
    "file",
    [
        pickle.dumps(Evil()),
        b"PK\x03\x04" + bytes(200),
        b"\x1f\x8b" + bytes(200),
        b"ustar" + bytes(600),
        b"",
        bytes(10_000),
        b"GGUF" + bytes(100),
    ],
    ids=["pickle", "zip", "gzip", "tar", "empty", "zeros", "gguf"],
)
def test_other_formats(fixture: UploadFixture, file: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    refused(fixture, send(fixture, {CONFIG: config(), TENSORS: file}))
    assert "code ran" not in capsys.readouterr().out


EVIL_NAMES = ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", "-a", ".hidden", "a b", "a" * 65]
EVIL_NAMES += [
    "ä",
    "а",
    "a\u202eb",
    "a\u200b",
    "ａ",
    "a\n",
    "a\r\nx: y",
    "%2e%2e",
    "a\ud800"[:1] + "é",
    "🦜",
    "~",
    "con:",
]


@quick
@given(st.sampled_from(EVIL_NAMES) | st.text(max_size=70))
def test_names_outside_of_the_alphabet(fixture: UploadFixture, name: str) -> None:
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    if not (name and set(name) <= plain and name[0] not in "._-" and len(name) <= 64):
        refused(fixture, send(fixture, whole(), name))


@quick
@given(st.data())
def test_what_is_accepted_after_random_changes_is_right_by_another_reader(
    fixture: UploadFixture, data: st.DataObject
) -> None:
    file = bytearray(save(tensors()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(file) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                file[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del file[place : place + data.draw(st.integers(1, 8))]
            case "insert":
                file[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    response = send(fixture, {CONFIG: config(), TENSORS: bytes(file)})
    if response.status_code != 201:
        refused(fixture, response)
        return
    found, right = load(bytes(file)), tensors()
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in right.items()}
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert response.json()["ranks"] == dict.fromkeys(SHAPES.modules, 2)

    async def remove() -> None:
        async with fixture.client() as client:
            await client.delete("/v1/adapters/x")

    asyncio.run(remove())
    nothing_is_left(fixture)
