"""`/v1/score` and `/v1/rerank`: asks the model whether a text is relevant, and uses the probability of its
answer.

The score is the probability of "yes" among "yes" and "no" as the answer's first token.
"""

import math
from collections.abc import Sequence

from starlette.types import Receive

from personae.actors.client import ModelCard
from personae.api.answering import answering
from personae.api.context import RequestContext
from personae.api.embeddings.prompts import MOST_INPUTS, Outcome, Outcomes, answered, as_completion, encoded
from personae.api.embeddings.wire import Asked
from personae.api.family import Family
from personae.api.wire.conversation import Message, SystemMessage, UserMessage
from personae.engine.params import SamplingParams
from personae.engine.tokens import Tokenizer
from personae.errors import RequestError

INSTRUCTION = "The document answers the query."
_SYSTEM = 'You judge whether a document meets an instruction for a query. Answer only "yes" or "no".'
_LONGEST_INSTRUCTION = 4096


async def relevance(
    context: RequestContext,
    receive: Receive,
    body: Asked,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    field: str,
) -> tuple[ModelCard, Outcomes, list[float]]:
    """How relevant the second text of each pair is to the first, from 0 to 1."""
    if instruction is not None and len(instruction) > _LONGEST_INSTRUCTION:
        raise RequestError(
            f"`instruction` may have at most {_LONGEST_INSTRUCTION} characters.", param="instruction"
        )
    if not 0 < len(pairs) <= MOST_INPUTS:
        raise RequestError(f"`{field}` must have 1 to {MOST_INPUTS} texts.", param=field)
    context = await answering(context, body.model)
    model = context.chosen(as_completion(body))
    yes, no = _answers(context.client.tokenizer)
    asked = as_completion(body)
    asked.prompt = await context.prepared(
        lambda brief: [_prompt(context, brief, pair, instruction or INSTRUCTION) for pair in pairs]
    )
    asked.add_special_tokens = False  # the chat template has written them
    prompts = await encoded(context, asked, field)
    asked.prompt = ""
    params = SamplingParams(
        1, 0, temperature=0.0, ignore_eos=True, speculate=False, logprobs=2, logprob_tokens=(yes, no)
    )
    found = await answered(context, receive, asked, model, prompts, params, prefix="score-", field=field)
    return model, found, [_score(outcome, yes, no) for outcome in found.outcomes]


def _prompt(context: RequestContext, brief: bool, pair: tuple[str, str], instruction: str) -> str:
    query, document = pair
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages: list[Message] = [SystemMessage(content=_SYSTEM), UserMessage(content=text)]
    return context.render_chat(messages, brief=brief, kwargs=_without_reasoning(context.family))


def _without_reasoning(family: Family) -> dict[str, bool]:
    thinks = family.template is not None and "enable_thinking" in family.template.source
    return {"enable_thinking": False} if thinks else {}


def _answers(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens with which "yes" and "no" begin. Raises RequestError if they are the same."""
    encoded = tokenizer.encode_batch(["yes", "no"], False, None, False, None)
    yes, no = (ids[0] for ids in encoded)
    if yes == no:
        raise RequestError(
            "This model cannot score: its tokens do not distinguish yes and no.", param="model"
        )
    return yes, no


def _score(outcome: Outcome, yes: int, no: int) -> float:
    assert outcome.next is not None, "log-probabilities were asked for"
    said = dict(outcome.next.top)
    return 1 / (1 + math.exp(min(said[no] - said[yes], 700.0)))
