"""The check of a batch's file reads each line as the route would read it."""

import json
from pathlib import Path
from typing import Any

import pytest

from personae.api.batches.input import check
from personae.api.settings import ApiSettings

CHAT = "/v1/chat/completions"


def checked(tmp_path: Path, settings: ApiSettings, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    path = tmp_path / "input.jsonl"
    path.write_text(json.dumps(line))
    return check(path, CHAT, settings)


@pytest.mark.parametrize(("model", "named"), [({}, []), ({"model": None}, []), ({"model": "x"}, ["x"])])
def test_a_line_may_leave_out_the_model(tmp_path: Path, model: dict[str, Any], named: list[str]) -> None:
    found = checked(tmp_path, ApiSettings(), **model)
    assert (found.errors, list(found.models)) == ([], named)


def test_unknown_fields_of_a_line_are_refused_or_ignored_as_the_server_is_told(tmp_path: Path) -> None:
    [error] = checked(tmp_path, ApiSettings(), weather=1).errors
    assert error.param == "body.weather"
    assert checked(tmp_path, ApiSettings(unknown_fields="ignore"), weather=1).errors == []
    messages = [{"role": "user", "content": "hi", "provider_specific_fields": None}]
    assert checked(tmp_path, ApiSettings(), messages=messages).errors == []
