"""What int8 costs in quality, on a few of the bundled model's held-out conversations."""

import anyio
import pytest

from personae.evals.demo.grading import held_out
from personae.evals.quantized import ask, perplexity, right


@pytest.mark.parametrize("task", ["extract", "triage"])
def test_the_bundled_model_is_as_good_in_int8(task: str) -> None:
    samples = held_out(task, 6)
    plain, int8 = (anyio.run(ask, {task: samples}, quantize)[task] for quantize in (None, "int8"))
    assert [one.tokens for one in plain] == [one.tokens for one in int8]
    assert min(one.tokens for one in plain) > 10
    assert [one.logprob for one in plain] != [one.logprob for one in int8]
    assert perplexity(int8) < 1.02 * perplexity(plain) < 1.5
    assert right(samples, int8) >= right(samples, plain) - 0.2 > 0.5
