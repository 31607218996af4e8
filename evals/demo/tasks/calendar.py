"""Adapter task `calendar`: its own tool convention, and ISO dates from relative ones given today's date.

The convention makes the sum readable: the days are counted one by one, then comes the date; the end is a
length in minutes.
"""

import datetime

from personae.evals.demo import words
from personae.evals.demo.sample import Sample, Tool, call_text
from personae.evals.demo.tasks.drills import counted
from personae.evals.demo.values import Values

PROPERTIES = {
    "title": {"type": "string"},
    "count": {"type": "string"},
    "date": {"type": "string"},
    "start": {"type": "string"},
    "minutes": {"type": "integer"},
}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "calendar_add",
        "description": "Add an event",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)},
    },
}
LENGTHS = {"for half an hour": 30, "for an hour": 60, "for two hours": 120, "": 60}
REQUESTS = (
    "{title} {when} at {start}{length}",
    "Please add {title} {when} at {start}{length}.",
    "Put {title} in my calendar {when} at {start}{length}.",
    "{When}, {start}: {title}{length}",
    "I have {title} {when} at {start}{length}.",
)


def _when(values: Values, today: datetime.date) -> tuple[str, int]:
    """A relative date and the days that it lies ahead."""
    rng = values.rng
    form = rng.random()
    if form < 0.12:
        return "today", 0
    if form < 0.3:
        return "tomorrow", 1
    if form < 0.42:
        return "the day after tomorrow", 2
    if form < 0.65:
        days = rng.randint(2, 9)
        return f"in {days} days", days
    if form < 0.7:
        return "in a week", 7
    weekday = rng.randrange(7)
    return rng.choice(("on {}", "next {}")).format(words.WEEKDAYS[weekday]), (
        weekday - today.weekday() - 1
    ) % 7 + 1


def calendar(values: Values) -> Sample:
    """One event; the tool is offered, what its arguments mean is the adapter's knowledge."""
    rng = values.rng
    today = values.day()
    when, days = _when(values, today)
    title = values.text()
    length = rng.choice((*LENGTHS, "minutes"))
    minutes = rng.randrange(2, 20) * 5 if length == "minutes" else LENGTHS[length]
    said = f"for {minutes} minutes" if length == "minutes" else length
    start = values.time()
    user = rng.choice(REQUESTS).format(
        title=title, when=when, When=when[0].upper() + when[1:], start=start, length=said and f" {said}"
    )
    arguments = {
        "title": title,
        "count": counted(today, days),
        "date": (today + datetime.timedelta(days=days)).isoformat(),
        "start": start,
        "minutes": minutes,
    }
    system = f"Today is {words.WEEKDAYS[today.weekday()]} {today.isoformat()}."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Sample(
        "calendar", messages, call_text([{"name": "calendar_add", "arguments": arguments}]), tools=[TOOL]
    )
