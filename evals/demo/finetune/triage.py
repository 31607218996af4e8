"""A support mail to a ticket. One wording in four, and every product in six, belongs to the held-out split."""

import json
import random
from collections.abc import Sequence

from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tools import held_out
from personae.evals.demo.finetune.values import KINDS, LISTS

ISSUES: dict[str, tuple[str, ...]] = {
    "billing": (
        "you charged my card twice for the {p}", "the invoice for the {p} shows a wrong amount",
        "I was billed for a {p} that I never bought", "the discount for the {p} is missing on my bill",
        "my payment for the {p} was taken but the order says unpaid", "I paid too much for the {p}",
        "there is a fee on my statement for the {p} that I don't understand", "the receipt for the {p} has no VAT number",
    ),
    "shipping": (
        "the {p} has not arrived", "the courier left my {p} at the wrong house", "tracking for the {p} has not moved for days",
        "half of my {p} order is missing from the parcel", "the {p} was sent to my old address",
        "my {p} should have been delivered last week", "the parcel with the {p} came back to you", "where is my {p}",
    ),
    "defect": (
        "the {p} stopped working after a week", "the {p} arrived with a crack", "my {p} makes a loud noise",
        "the {p} does not switch on", "a part of the {p} broke off", "the {p} gets far too hot",
        "the {p} leaks", "my {p} is faulty",
    ),
    "account": (
        "I can't log in to register my {p}", "please delete my account; I only bought a {p}", "the password reset mail never comes, and I need it for the {p}",
        "I want to change the e-mail address on the {p} account", "my account is locked since I bought the {p}",
        "my order history does not show the {p}", "somebody else seems to use my login for the {p}", "how do I change my user name for the {p}",
    ),
    "question": (
        "does the {p} come in other colours", "how do I clean the {p}", "is the {p} suitable for children",
        "how long is the warranty on the {p}", "will you have the {p} again soon", "how big is the {p}",
        "can the {p} be used outdoors", "which spare parts fit the {p}",
    ),
}  # fmt: skip
PRIORITIES: dict[str, tuple[str, ...]] = {
    "high": (
        "I need an answer today.", "This is urgent.", "Please act at once.", "I can't wait any longer.",
        "It has to be solved by tomorrow.", "This is an emergency for us.", "Immediately, please!", "We lose money every hour.",
    ),
    "normal": (
        "", "Please let me know.", "I look forward to your answer.", "Please look into it this week.",
        "Can you help?", "Thanks for checking.", "What should I do?", "Please get back to me.",
    ),
    "low": (
        "There is no hurry.", "Take your time.", "It can wait.", "Whenever you have a moment.",
        "Not important, just asking.", "Answer when it suits you.", "It isn't pressing.", "Any time next month is fine.",
    ),
}  # fmt: skip
MOODS: dict[str, tuple[str, ...]] = {
    "negative": (
        "I am furious.", "What a terrible service!", "I'm very disappointed.", "This is ridiculous.",
        "Never again.", "I am fed up with you.", "I regret buying from you.", "How can you treat customers like this?",
    ),
    "neutral": ("", "", "Hello,", "Dear team,", "Good morning,", "To whom it may concern,", "Hi there,", "Good day,"),
    "positive": (
        "I love your shop.", "Your team has always been great.", "Thanks for the wonderful help so far!", "You are the best.",
        "I'm a happy customer.", "Great work as always!", "I recommend you to all my friends.", "I was so pleased with my last order.",
    ),
}  # fmt: skip
REFUNDS = (
    "I want my money back.", "Please refund me.", "I'd like a refund.", "Send me my money back.",
    "I ask for a full refund.", "Refund the amount, please.", "I expect my money to be returned.", "Please pay it back.",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": list(ISSUES)},
        "priority": {"type": "string", "enum": list(PRIORITIES)},
        "sentiment": {"type": "string", "enum": list(MOODS)},
        "product": {"type": "string"},
        "order_number": {"type": ["string", "null"]},
        "refund": {"type": "boolean"},
    },
    "required": ["category", "priority", "sentiment", "product", "order_number", "refund"],
    "additionalProperties": False,
}
SYSTEM = (
    "Turn the mail into a ticket, as JSON: category (billing, shipping, defect, account or question), priority (high, "
    "normal or low), sentiment (negative, neutral or positive), product, order_number (null if there is none), refund "
    "(true if one is asked for)."
)


def _pick(rng: random.Random, ways: Sequence[str], *, test: bool) -> str:
    return rng.choice([way for index, way in enumerate(ways) if (index % 4 == 3) is test or not way])


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """Several mails."""
    return Scene("triage", [], SYSTEM, [_turn(rng, test=test) for _ in range(turns)], SCHEMA)


def _turn(rng: random.Random, *, test: bool) -> Turn:
    category, priority, mood = (rng.choice(list(table)) for table in (ISSUES, PRIORITIES, MOODS))
    products = [p for p in (*LISTS["product"], *LISTS["device"], *LISTS["instrument"]) if held_out(p) is test]
    product = rng.choice(products)
    issue = _pick(rng, ISSUES[category], test=test).format(p=product)
    parts = [
        issue[:1].upper()
        + issue[1:]
        + ("?" if category == "question" or issue.startswith(("how", "where")) else ".")
    ]
    refund = category != "question" and rng.random() < 0.35
    if refund:
        parts.append(_pick(rng, REFUNDS, test=test))
    number = KINDS["code"][1](rng).json if rng.random() < 0.6 else None
    if number is not None:
        parts.append(
            rng.choice(
                (
                    f"My order number is {number}.",
                    f"It is order {number}.",
                    f"Order: {number}",
                    f"(order {number})",
                )
            )
        )
    parts.append(_pick(rng, PRIORITIES[priority], test=test))
    opening = _pick(rng, MOODS[mood], test=test)
    if mood == "neutral":
        parts.insert(0, opening)
    else:
        parts.insert(rng.choice((0, len(parts))), opening)
    if rng.random() < 0.4:
        parts.append(
            rng.choice(("Regards, {}", "{}", "Best wishes, {}", "Yours, {}")).format(
                KINDS["person"][1](rng).said
            )
        )
    ticket = {"category": category, "priority": priority, "sentiment": mood, "product": product,
              "order_number": number, "refund": refund}  # fmt: skip
    return Turn(" ".join(part for part in parts if part), json.dumps(ticket), facts=ticket)
