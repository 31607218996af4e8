"""Fuzzes a server by its own /openapi.json: no 5xx, and no answer that the document does not describe.

    python -m personae.evals.api_fuzz http://127.0.0.1:8000 --examples 500 [--key KEY]

schemathesis (https://schemathesis.readthedocs.io) makes the requests: valid ones, and ones with one error. A
request that is valid by the schema seldom makes sense in every field. So that many requests are answered,
half of them keep few of their fields and name a served model. Deleting routes are fuzzed too, so do not run
this against a server in use.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, CheckContext, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Err
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from personae.api.targets import TIMEOUT_HEADER


def not_a_failure(context: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """No 5xx, except the 504 of a request with a short timeout."""
    asked = (isinstance(case.body, dict) and "timeout" in case.body) or TIMEOUT_HEADER in (case.headers or {})
    return None if response.status_code == 504 and asked else not_a_server_error(context, response, case)


CHECKS = [
    not_a_failure,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
_DONE = b"data: [DONE]\n\n"  # ends OpenAI's streams; unlike the other events it is not JSON
MODES = tuple(GenerationMode)
FEW = 3
SOUND: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "Hello",
    "input": "Hello",
    "tokens": [1, 2],
}
PLAIN: dict[str, str] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/tokenize": "prompt",
}
"""The one field that a route needs besides `model`. A plain request is sent first, because every drawn one
may be a 400."""

Described = APIOperation[Any, Any, Any, Any]


def operations(document: dict[str, Any]) -> Iterator[Described]:
    """The operations that an OpenAPI document describes."""
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        if isinstance(found, Err):
            raise found.err()
        yield found.ok()


def ask(
    operation: Described,
    mode: GenerationMode,
    url: str,
    *,
    model: str,
    examples: int,
    headers: dict[str, str] | None = None,
    fixed: bool = True,
) -> Counter[int]:
    """Send this many requests, and a plain one, and check every answer. Returns the statuses.

    With `fixed` the requests are the same each time. Raises schemathesis's failures, which say how to repeat
    the request.
    """
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=fixed,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def once(case: Case[Any], data: st.DataObject) -> None:
        body = case.body
        valid = mode is GenerationMode.POSITIVE
        if valid and isinstance(body, dict) and SOUND.keys() & body.keys() and data.draw(st.booleans()):
            kept = data.draw(st.sets(st.sampled_from(sorted(body)), max_size=FEW))
            case.body = {name: body[name] for name in kept}
            case.body |= {"model": model, **{name: SOUND[name] for name in SOUND if name in body}}
        send(case)

    def send(case: Case[Any]) -> None:
        response = case.call(base_url=url, headers=headers)
        response.content = response.content.removesuffix(_DONE)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    if mode is GenerationMode.POSITIVE and operation.path in PLAIN:
        name = PLAIN[operation.path]
        send(operation.Case(body={"model": model, name: SOUND[name]}, media_type="application/json"))
    try:
        once()
    except Unsatisfiable:  # no invalid request exists for this operation
        assert not operation.body
    return statuses


def main() -> None:
    """Fuzz a running server and print what it answered."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=200, help="of each operation and kind")
    parser.add_argument("--key", help="an admin's key, if the server asks for one")
    arguments = parser.parse_args()
    headers = {} if arguments.key is None else {"authorization": f"Bearer {arguments.key}"}
    with httpx.Client(base_url=arguments.url, headers=headers) as client:
        document = client.get("/openapi.json").raise_for_status().json()
        model = client.get("/v1/models").json()["data"][0]["id"]
    failed = 0
    for operation in operations(document):
        for mode in MODES:
            try:
                found = ask(
                    operation,
                    mode,
                    arguments.url,
                    model=model,
                    examples=arguments.examples,
                    headers=headers,
                    fixed=False,
                )
            except Exception as failure:
                failed += 1
                print(f"{operation.label} {mode.value}: FAILED\n{failure}")
            else:
                shown = ", ".join(f"{count} x {status}" for status, count in sorted(found.items()))
                print(f"{operation.label} {mode.value}: {shown}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
