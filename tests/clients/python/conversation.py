"""What every client is put through: a question, two calls in one turn, their results, the answer, and one
more question. A program prints one line of JSON for each way in which it had the conversation."""

import json
import sys
from collections.abc import Sequence
from typing import Any

MODEL = "base"
QUESTION = "How is the weather in Oslo, and how late is it?"
THANKS = "Thanks!"
WEATHER_TEXT, TIME_TEXT = "Looks up the weather of a city.", "Tells the time."


def get_weather(city: str) -> str:
    """Looks up the weather of a city."""
    return f"7 degrees in {city}"


def get_time() -> str:
    """Tells the time."""
    return "10:15"


def result_of(name: str, arguments: str) -> str:
    """What a call of that name brings; `arguments` are JSON as they came."""
    return {"get_weather": get_weather, "get_time": get_time}[name](**json.loads(arguments))


_WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": WEATHER_TEXT, "parameters": _WEATHER, "strict": True},
    {"name": "get_time", "description": TIME_TEXT, "parameters": _NOTHING, "strict": True},
]
CHAT_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": one} for one in FUNCTIONS]
RESPONSES_TOOLS: list[dict[str, Any]] = [{"type": "function", **one} for one in FUNCTIONS]


def delivered(way: str, calls: Sequence[tuple[str, Any]], texts: Sequence[str]) -> None:
    """Print what came: the calls with their arguments as objects, and the texts of the two answers."""
    print(json.dumps({"way": way, "calls": [list(one) for one in calls], "texts": list(texts)}), flush=True)


def address() -> str:
    """Of the server, with `/v1`."""
    return sys.argv[1]


def key() -> str:
    """For the server."""
    return sys.argv[2] if len(sys.argv) > 2 else "none"
