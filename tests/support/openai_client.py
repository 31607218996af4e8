"""The `openai` package as a client that refuses answers of another form than OpenAI's."""

from openai import OpenAI
from patience import PATIENCE


def openai_client(address: str, key: str = "none") -> OpenAI:
    return OpenAI(
        base_url=f"{address}/v1",
        api_key=key,
        max_retries=0,
        timeout=PATIENCE,
        _strict_response_validation=True,
    )
