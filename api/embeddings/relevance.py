"""`/v1/score` and `/v1/rerank`: asks the model whether a text is relevant, and uses the probability of its
answer.

The score is the probability of "yes" among "yes" and "no" as the answer's first token.
"""

import math
from collections.abc import Sequence

from starlette.types import Receive

from personae.actors.client import ModelCard
from personae.api.answering import answering, chosen_model
from personae.api.embeddings.prompts import MOST_INPUTS, Outcome, Outcomes, answered, as_completion, encoded
from personae.api.embeddings.wire import PromptFields
from personae.api.exchange import Exchange
from personae.api.family import Family
from personae.api.prompt import render_chat
from personae.api.wire.conversation import Message, SystemMessage, UserMessage
from personae.engine.params import SamplingParams
from personae.engine.tokens import Tokenizer
from personae.errors import RequestError

INSTRUCTION = "The document answers the query."
_SYSTEM = 'You judge whether a document meets an instruction for a query. Answer only "yes" or "no".'
_LONGEST_INSTRUCTION = 4096


async def relevance(
    exchange: Exchange,
    receive: Receive,
    body: PromptFields,
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
    exchange = await answering(exchange, body.model)
    model = chosen_model(exchange, as_completion(body))
    yes, no = _answers(exchange.client.tokenizer)
    asked = as_completion(body)
    asked.prompt = await exchange.prepared(
        lambda brief: [_prompt(exchange, brief, pair, instruction or INSTRUCTION) for pair in pairs]
    )
    asked.add_special_tokens = False  # the chat template has written them
    prompts = await encoded(exchange, asked, field)
    asked.prompt = ""
    params = SamplingParams(
        1, 0, temperature=0.0, ignore_eos=True, speculate=False, logprobs=2, logprob_tokens=(yes, no)
    )
    found = await answered(exchange, receive, asked, model, prompts, params, prefix="score-", field=field)
    return model, found, [_score(outcome, yes, no) for outcome in found.outcomes]


def _prompt(exchange: Exchange, brief: bool, pair: tuple[str, str], instruction: str) -> str:
    query, document = pair
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages: list[Message] = [SystemMessage(content=_SYSTEM), UserMessage(content=text)]
    return render_chat(exchange, messages, brief=brief, kwargs=_without_reasoning(exchange.family))


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
