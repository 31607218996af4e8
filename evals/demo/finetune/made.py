"""Tools made of a verb, a thing and its properties: there are many, and their names say nothing of the past."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personae.evals.demo.finetune.tools import Spec

THINGS = [
    "invoice",
    "ticket",
    "shipment",
    "greenhouse",
    "lease",
    "badge",
    "warehouse",
    "telescope",
    "ferry",
    "elevator",
    "newsletter",
    "voucher",
    "locker",
    "membership",
    "auction",
    "drone",
    "satellite",
    "camera",
    "printer",
    "workshop",
    "exhibit",
    "mural",
    "trail",
    "campsite",
    "beehive",
    "orchard",
    "aquarium",
    "boat",
    "harbor slot",
    "tram",
    "crane",
    "turbine",
    "battery",
    "sensor",
    "router",
    "database",
    "backup",
    "deployment",
    "pipeline",
    "dashboard",
    "survey",
    "quiz",
    "lecture",
    "thesis",
    "grant",
    "donation",
    "scholarship",
    "choir",
    "orchestra",
    "stage",
    "costume",
    "puppet",
    "tournament",
    "referee",
    "stadium",
    "jersey",
    "trophy",
    "marathon",
    "gym pass",
    "ski lift",
    "surfboard",
    "kayak",
    "sauna",
    "spa visit",
    "massage",
    "haircut",
    "tattoo",
    "passport",
    "permit",
    "license",
    "insurance claim",
    "mortgage",
    "pension",
    "dividend",
    "subscription",
    "podcast",
    "webinar",
    "advert",
    "banner",
    "logo",
    "catalog",
    "brochure",
    "parcel",
    "pallet",
    "container",
    "truck",
    "depot",
    "mill",
    "quarry",
    "kiln",
    "loom",
    "bakery order",
    "wine tasting",
    "cheese board",
    "tea blend",
    "spice mix",
    "cocktail",
    "buffet",
    "picnic",
    "hamper",
]
VERBS = {
    "create": "Create a new {}.", "update": "Change a {}.", "register": "Register a {}.", "find": "Find a {}.",
    "estimate_cost_of": "Estimate what a {} costs.", "schedule": "Schedule a {}.", "inspect": "Inspect a {}.",
    "assign": "Assign a {} to somebody.", "archive": "Archive a {}.", "compare": "Compare a {} with others.",
    "reserve": "Reserve a {}.", "calculate_size_of": "Calculate the size of a {}.", "get": "Get a {}.",
    "check_status_of": "Check the status of a {}.", "search": "Search for a {}.", "configure": "Configure a {}.",
}  # fmt: skip
ASKS = {
    "create": ("Create a {}", "I need a new {}", "Set up a {}", "Make me a {}"),
    "update": ("Change the {}", "Update the {}", "Edit our {}"),
    "register": ("Register a {}", "Enter a {} into the system", "Sign up a {}"),
    "find": ("Find a {}", "Is there a {}", "Look for a {}"),
    "estimate_cost_of": ("What would a {} cost", "Estimate the cost of a {}", "Price a {}"),
    "schedule": ("Schedule a {}", "Plan a {}", "Put a {} on the calendar"),
    "inspect": ("Inspect the {}", "Have a look at the {}", "Examine the {}"),
    "assign": ("Assign a {}", "Hand over a {}", "Give somebody the {}"),
    "archive": ("Archive the {}", "Put the {} away", "Store the {}"),
    "compare": ("Compare the {}", "How does the {} compare", "Compare our {} with the others"),
    "reserve": ("Reserve a {}", "Book a {}", "Keep a {} for me"),
    "calculate_size_of": ("How large is a {}", "Calculate the size of a {}", "Work out how big the {} is"),
    "get": ("Show me the {}", "Get the {}", "Fetch the {}"),
    "check_status_of": ("What is the status of the {}", "How far is the {}", "Check on the {}"),
    "search": ("Search for a {}", "Look up a {}", "Which {} do we have"),
    "configure": ("Configure the {}", "Set the {} up", "Adjust the {}"),
}
PROPERTIES = {
    "owner": "person", "city": "city", "reference": "code", "capacity": "int(2-900)", "price": "money",
    "weight": "num(1-400)", "color": "color", "material": "material", "start_date": "date", "deadline": "date",
    "opening_time": "time", "contact_email": "email", "phone": "phone", "priority": "enum(low,normal,high)",
    "country": "country", "discount": "percent", "quantity": "int(1-60)", "length": "num(1-90)",
    "width": "num(1-90)", "depth": "num(1-40)", "temperature": "num(-20-90)", "year": "int(1980-2025)",
    "category": "enum(standard,premium,basic)", "language": "language", "status": "enum(open,closed,pending)",
    "duration": "int(5-240)", "rating": "int(1-5)", "floor": "int(0-30)", "speed": "int(5-300)",
    "version": "num(1-9)", "tags": "list(word)", "members": "list(person)", "levels": "list(int(1-50))",
    "supplier": "company", "website": "url", "address": "street", "zip_code": "zip", "budget": "money",
    "mode": "enum(automatic,manual,eco)", "shape": "enum(round,square,oval)", "topic": "topic",
    "retries": "int(1-9)", "threshold": "num(0-50)", "position": "coordinates", "label": "word",
    "manager": "person", "region": "enum(north,south,east,west)", "frequency": "enum(daily,weekly,monthly)",
    "latitude": "num(-60-60)", "longitude": "num(-170-170)", "age": "int(1-99)", "height": "num(1-300)",
}  # fmt: skip
ABOUT = ("{}", "{} of the {thing}", "The {} to use", "{} wanted", "Which {}", "{} that the {thing} has")
LINKS = (" with {}", ", {}", ": {}", " and set {}", "; {}", " where {}")
SAYS = ("{} {v}", "{}: {v}", "{} = {v}", "the {} {v}", "{} is {v}", "a {} of {v}")


def made_tool(rng: random.Random, test: bool, held_out: Callable[[str], bool]) -> "Spec":
    """A tool of a split; things that are held out are in no tool of the other split."""
    from personae.evals.demo.finetune.tools import Parameter, Spec

    thing = rng.choice([thing for thing in THINGS if held_out(thing) is test])
    verb = rng.choice(list(VERBS))
    names = rng.sample(list(PROPERTIES), rng.choice((1, 2, 2, 3, 3, 4, 5)))
    needed = max(1, len(names) - rng.choice((0, 1, 1, 2)))
    template = rng.choice(ABOUT)
    parameters = tuple(
        Parameter(
            name,
            PROPERTIES[name],
            template.format(name.replace("_", " "), thing=thing).capitalize(),
            index < needed,
        )
        for index, name in enumerate(names)
    )
    says = rng.choice(SAYS)
    questions = []
    for ask in ASKS[verb]:
        parts = [says.format(name.replace("_", " "), v="{" + name + "}") for name in names[:needed]]
        text = ask.format(thing) + rng.choice(LINKS).format(", ".join(parts))
        for name in names[needed:]:
            text += "[, " + says.format(name.replace("_", " "), v="{" + name + "}") + "]"
        questions.append(text + rng.choice((".", "", "?" if ask[0] in "WH" else ".")))
    name = f"{verb}_{thing}".replace(" ", "_").replace("_of_", "_")
    return Spec(thing.partition(" ")[0], name, VERBS[verb].format(thing), parameters, tuple(questions))
