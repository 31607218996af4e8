import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from personae.errors import GrammarError
from personae.grammar.schema.worker import CanonicalWorker

HOSTILE = {
    "allOf": [{"oneOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(9)]} for i in range(40)]
}


def laughs(depth):
    """References whose inlined form doubles with each level."""
    definitions = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "contains": {"$ref": f"#/$defs/d{n + 1}"}}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "null"}}}


@pytest.fixture
def worker():
    worker = CanonicalWorker()
    yield worker
    worker.close()


def test_canonical_forms_come_back_from_the_process(worker):
    assert worker.canonicalise({"type": "integer", "not": {"type": "number"}}) is False
    assert worker.canonicalise({"allOf": [{"type": "null"}]})["type"] == "null"


def test_threads_share_the_process_one_after_the_other(worker):
    with ThreadPoolExecutor(4) as pool:
        forms = list(pool.map(lambda n: worker.canonicalise({"allOf": [{"const": n}]}), range(20)))
    assert [form["const"] for form in forms] == list(range(20))


def test_a_schema_past_the_time_limit_is_refused():
    worker = CanonicalWorker(seconds=0.0)
    with pytest.raises(GrammarError, match="too complex") as refusal:
        worker.canonicalise({"type": "null"})
    assert refusal.value.param == "response_format.json_schema.schema"
    worker.close()


def test_a_hostile_schema_ends_within_its_limits_and_the_next_one_is_served():
    worker = CanonicalWorker(seconds=3.0, memory=2**29)
    with contextlib.suppress(GrammarError):
        worker.canonicalise(HOSTILE)
    with pytest.raises(GrammarError):
        worker.canonicalise(laughs(40))
    assert worker.canonicalise({"type": "null"})["type"] == "null"
    worker.close()


def test_a_schema_that_the_library_refuses_is_an_error_and_not_the_end_of_the_process(worker):
    with pytest.raises(GrammarError, match="cannot be analysed"):
        worker.canonicalise({"$ref": "#/nowhere"})
    assert worker.canonicalise(True) is True


def test_closing_twice_and_without_use_is_harmless(worker):
    worker.close()
    worker.close()
