"""Adapter task `triage`: a support mail becomes a ticket, whose form the adapter knows by heart."""

from personae.evals.demo import words
from personae.evals.demo.sample import Sample, dumps
from personae.evals.demo.values import Values

ISSUES: dict[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for my {product}",
        "the invoice for my {product} is wrong",
        "I still wait for the refund of my {product}",
        "my card was declined when I paid for the {product}",
        "you took too much money for the {product}",
    ),
    "shipping": (
        "my {product} has not arrived",
        "the parcel with my {product} is late",
        "my {product} came to the wrong address",
        "the tracking of my {product} has not moved for days",
        "the courier lost my {product}",
    ),
    "defect": (
        "my {product} does not turn on",
        "the {product} is broken",
        "my {product} makes a strange noise",
        "the screen of my {product} is cracked",
        "my {product} stops after a minute",
    ),
    "account": (
        "I cannot log in to register my {product}",
        "I forgot the password for my {product}",
        "my account does not show my {product}",
        "please change the email of my {product} account",
        "I am locked out of the {product} app",
    ),
    "question": (
        "how do I clean my {product}",
        "which battery fits the {product}",
        "is the {product} waterproof",
        "where do I find the manual of the {product}",
        "does the {product} work abroad",
    ),
}
PRIORITIES: dict[str, tuple[str, ...]] = {
    "high": ("I need this today.", "This is urgent.", "Our work has stopped.", "Please act at once."),
    "normal": ("Please look into it this week.", "I would like an answer soon.", "Let me know what to do."),
    "low": ("There is no hurry.", "Take your time.", "It can wait.", "Whenever you have a moment."),
}
MOODS: dict[str, tuple[str, ...]] = {
    "angry": ("This is outrageous!", "I am furious.", "I am really fed up.", "What a terrible service!"),
    "neutral": ("Hello,", "Dear team,", "To whom it may concern,", "Good day,"),
    "happy": ("I love your shop!", "You have always been great.", "Thanks for the wonderful help so far!"),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": list(ISSUES)},
        "priority": {"type": "string", "enum": list(PRIORITIES)},
        "product": {"type": "string"},
        "sentiment": {"type": "string", "enum": list(MOODS)},
    },
    "required": ["category", "priority", "product", "sentiment"],
}


def triage(values: Values) -> Sample:
    """A mail whose sentences give away category, priority, product and sentiment."""
    rng = values.rng
    category, priority, sentiment = (rng.choice(tuple(table)) for table in (ISSUES, PRIORITIES, MOODS))
    product = values.only(
        lambda: (
            f"{values.pseudo().capitalize()} {rng.choice(words.THINGS)}"
            if rng.random() < 0.5
            else f"{rng.choice(words.MAKERS)} {rng.choice(words.THINGS)} {rng.randint(10, 999)}"
        )
    )
    issue = rng.choice(ISSUES[category]).format(product=product)
    asked = "?" if category == "question" else "."
    middle = [issue[0].upper() + issue[1:] + asked, rng.choice(PRIORITIES[priority])]
    if rng.random() < 0.3:
        middle.reverse()
    mail = " ".join([rng.choice(MOODS[sentiment]), *middle]) + rng.choice(
        ("", f" {values.person()}", f" Best, {values.person()}")
    )
    ticket = {"category": category, "priority": priority, "product": product, "sentiment": sentiment}
    return Sample("triage", [{"role": "user", "content": mail}], dumps(ticket), schema=SCHEMA)
