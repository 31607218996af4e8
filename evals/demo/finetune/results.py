"""What a tool sends back, and the sentence that tells it to the user."""

import json
import random
import re
from typing import Any, NamedTuple

from personae.evals.demo.finetune import values as v
from personae.evals.demo.finetune.made import PROPERTIES


class Result(NamedTuple):
    """text: the content of the tool's message. said: the answer to the user."""

    text: str
    said: str


CONDITIONS = (
    "sunny",
    "light rain",
    "cloudy",
    "snow",
    "foggy",
    "clear sky",
    "windy",
    "thunderstorms",
    "overcast",
)
STATES = ("confirmed", "shipped", "delayed", "in transit", "ready for pickup", "cancelled", "running", "on hold",
          "scheduled", "out for delivery", "active", "waiting for approval")  # fmt: skip
ERRORS = (
    "city not found", "the service is not available", "invalid date", "permission denied", "unknown reference",
    "the request timed out", "no such user", "rate limit exceeded", "the address is incomplete", "unit not supported",
    "nothing was found", "the account is locked", "quota exceeded", "connection refused", "no seats left",
    "the file does not exist", "amount is too high", "the shop is closed", "invalid postal code", "wrong password",
    "the calendar is read-only", "out of stock", "the printer is offline", "value out of range",
)  # fmt: skip
SENTENCES = (
    "{n} degrees and {condition}", "The order {code} is {state}.", "{n} results", "Booked for {person} at {time}.",
    "The parcel arrives on {date}.", "{company} is trading at {n}.", "Open from {time}, closed on Sundays",
    "It is {time} in {city}.", "Your reference is {code}.", "Sent to {email}.", "{n} km, about {m} minutes by car",
    "{person} is available on {date}", "The total is {n}.", "The {animal} lives about {m} years.", "{word} means {color}",
    "Reminder set for {time}", "{condition}, wind {m} km/h", "The meeting was moved to {date} at {time}.",
    "{n} of {m} seats are free", "Table for {m} reserved under the name {person}",
)  # fmt: skip
UNITS = {"c": "°C", "km": "km", "kg": "kg", "eur": "EUR", "usd": "USD", "percent": "%", "minutes": "minutes",
         "kmh": "km/h", "m": "m", "hours": "hours", "mb": "MB", "days": "days"}  # fmt: skip
"""How the end of a key says in what its number is measured."""
MEASURED = {
    "temperature_c": (-15, 38), "distance_km": (1, 900), "weight_kg": (1, 300), "price_eur": (3, 900),
    "total_usd": (5, 4000), "humidity_percent": (10, 99), "duration_minutes": (3, 300), "wind_kmh": (1, 90),
    "height_m": (1, 900), "time_hours": (1, 30), "size_mb": (1, 800), "delivery_days": (1, 20),
}  # fmt: skip
COUNTED = {"count": (0, 40), "score": (1, 99), "result": (1, 9000), "population": (900, 9000000), "age": (1, 99),
           "temperature": (-15, 38), "balance": (1, 9000), "total": (1, 5000), "area": (1, 900), "value": (1, 900)}  # fmt: skip
DONE = (
    {"ok": True},
    {"status": "ok"},
    {"success": True},
    {"status": "success"},
    {"result": "done"},
    {"done": True},
)
DONE_TEXTS = ("ok", "OK", "done", "Done.", "success", "true")


def words(key: str) -> str:
    """A key as words: `openingTime` and `opening_time` are "opening time"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).replace("_", " ").replace("-", " ").lower()


def value_text(value: Any) -> str:
    """A value as one says it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return joined([value_text(one) for one in value]) or "empty"
    if isinstance(value, dict):
        return ", ".join(f"{words(key)} {value_text(one)}" for key, one in value.items())
    return str(value)


def joined(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def clause(key: str, value: Any) -> str:
    """`the temperature is 18 °C`."""
    if isinstance(value, bool):
        return f"it is {words(key)}" if value else f"it is not {words(key)}"
    head, _, unit = key.rpartition("_")
    if head and unit in UNITS and isinstance(value, int | float):
        return f"the {words(head)} is {value} {UNITS[unit]}"
    return f"the {words(key)} is {value_text(value)}"


def sentence(text: str) -> str:
    """With a capital in front and a stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def failed(rng: random.Random) -> Result:
    """A tool's error."""
    error = rng.choice(ERRORS)
    if rng.random() < 0.3:
        error = f"{rng.choice(('code', 'item', 'user', 'key'))} {v.KINDS['code'][1](rng).said} {rng.choice(('is unknown', 'not found', 'is invalid', 'has expired'))}"
    shown = rng.choice((
        {"error": error}, {"error": error}, {"status": "error", "message": error}, {"error": {"message": error}},
        {"ok": False, "error": error}, f"Error: {error}", f"error: {error}", f"Failed: {error}", f"ERROR {error}",
        {"error": error, "code": rng.choice((400, 404, 409, 429, 500, 503))},
    ))  # fmt: skip
    return Result(
        shown if isinstance(shown, str) else _dumps(shown, rng), f"That did not work: {error.rstrip('.')}."
    )


def succeeded(rng: random.Random, arguments: dict[str, Any]) -> Result:
    """What a tool found out. It often repeats arguments, which the answer leaves out."""
    draw = rng.random()
    if draw < 0.14:
        text = _sentence(rng)
        return Result(text, sentence(text))
    if draw < 0.2:
        text = rng.choice((str(rng.randint(1, 9000)), f"{rng.uniform(0, 900):.2f}", f"{rng.uniform(0, 90):.1f}",
                           v.KINDS["code"][1](rng).said))  # fmt: skip
        return Result(text, f"The result is {text}.")
    if draw < 0.26:
        text = rng.choice(DONE_TEXTS) if rng.random() < 0.4 else _dumps(rng.choice(DONE), rng)
        return Result(text, "Done.")
    if draw < 0.36:
        return _listed(rng)
    return _fields(rng, arguments)


def _sentence(rng: random.Random) -> str:
    kinds = {name: v.KINDS[name][1](rng).said for name in ("person", "code", "email", "time", "date")}
    drawn = {name: v.word(rng, name).json for name in ("city", "company", "animal", "word", "color")}
    numbers = {"n": rng.randint(2, 900), "m": rng.randint(2, 60)}
    return rng.choice(SENTENCES).format(
        condition=rng.choice(CONDITIONS), state=rng.choice(STATES), **kinds, **drawn, **numbers
    )


def _listed(rng: random.Random) -> Result:
    kind = rng.choice(("city", "person", "dish", "company", "word", "food", "animal", "product"))
    found = [
        v.KINDS[kind][1](rng).json if kind in v.KINDS else v.word(rng, kind).json
        for _ in range(rng.randint(0, 4))
    ]
    key = rng.choice(("results", "items", "matches", f"{kind}s", "names"))
    shape = rng.random()
    if not found:
        return Result(_dumps(rng.choice(([], {key: []})), rng), "Nothing was found.")
    if shape < 0.5:
        extra = {rng.choice(("price", "year", "rating")): rng.randint(1, 90)} if rng.random() < 0.5 else {}
        rows = [{"name": name, **{k: rng.randint(1, 90) for k in extra}} for name in found]
        said = joined([f"{row['name']}" + "".join(f" ({k} {row[k]})" for k in extra) for row in rows])
        return Result(_dumps(rng.choice((rows, {key: rows})), rng), f"I found {said}.")
    return Result(_dumps(rng.choice((found, {key: found})), rng), f"I found {joined(found)}.")


def _fields(rng: random.Random, arguments: dict[str, Any]) -> Result:
    shown: dict[str, Any] = {}
    for _ in range(rng.choices((1, 2, 3, 4), (35, 35, 20, 10))[0]):
        key, value = _field(rng)
        shown.setdefault(key, value)
    camel = rng.random() < 0.12
    if camel:
        shown = {
            _camel(key) if key.rpartition("_")[2] not in UNITS else key: one for key, one in shown.items()
        }
    said = sentence(joined([clause(key, value) for key, value in shown.items()]))
    if rng.random() < 0.35:
        echoed = {
            key: one for key, one in arguments.items() if key not in shown and isinstance(one, str | int)
        }
        shown = {**dict(list(echoed.items())[:2]), **shown}
    elif rng.random() < 0.12:
        shown = {rng.choice(("data", "result", "response", "current")): shown}
    if rng.random() < 0.08:
        shown = {"status": "ok", **shown} if "status" not in shown else shown
    return Result(_dumps(shown, rng), said)


def _field(rng: random.Random) -> tuple[str, Any]:
    draw = rng.random()
    if draw < 0.25:
        key = rng.choice(list(MEASURED))
        value = rng.randint(*MEASURED[key])
        return key, value if rng.random() < 0.7 else round(value + rng.random(), 1)
    if draw < 0.4:
        key = rng.choice(list(COUNTED))
        value = rng.randint(*COUNTED[key])
        return key, value if rng.random() < 0.6 else round(value + rng.random(), 2)
    if draw < 0.5:
        return rng.choice(("condition", "weather", "forecast", "summary")), rng.choice(CONDITIONS)
    if draw < 0.6:
        return rng.choice(("status", "state")), rng.choice(STATES)
    if draw < 0.65:
        return rng.choice(("available", "open", "paid", "valid", "delivered")), rng.random() < 0.5
    if draw < 0.75:
        key = rng.choice(("id", "reference", "ticket_id", "confirmation", "tracking_number", "order_id"))
        return key, v.KINDS["code"][1](rng).json
    from personae.evals.demo.finetune.tools import value_of

    key = rng.choice(list(PROPERTIES))
    return key, None if rng.random() < 0.03 else value_of(PROPERTIES[key], rng).json


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _dumps(value: Any, rng: random.Random) -> str:
    compact = rng.random() < 0.3
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
