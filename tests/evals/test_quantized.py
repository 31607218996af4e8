"""What fewer bits cost in quality, on a few of the bundled model's held-out conversations."""

import anyio
import pytest

from personae.evals.demo.grading import held_out
from personae.evals.quantized import ask, perplexity, right


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("task", ["extract", "triage"])
def test_the_bundled_model_is_as_good_in_fewer_bits(task: str, quantize: str) -> None:
    samples = held_out(task, 6)
    plain, fewer = (anyio.run(ask, {task: samples}, kept)[task] for kept in (None, quantize))
    assert [one.tokens for one in plain] == [one.tokens for one in fewer]
    assert min(one.tokens for one in plain) > 10
    assert [one.logprob for one in plain] != [one.logprob for one in fewer]
    assert perplexity(fewer) < 1.02 * perplexity(plain) < 1.5
    assert right(samples, fewer) >= right(samples, plain) - 0.2 > 0.5
