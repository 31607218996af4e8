"""Adapter task `invoices`: an invoice's text becomes nested JSON. Totals are read, not computed."""

from personae.evals.demo.sample import Json, Sample, dumps
from personae.evals.demo.values import Values

HEADS = (
    "Invoice {number} for {customer}, {date}.",
    "{date}: invoice {number} to {customer}.",
    "Invoice no. {number}\nDate: {date}\nCustomer: {customer}",
)
LINES = ("{quantity} x {name} at {price} = {total}", "{name}, {quantity} pieces at {price} each: {total}")
TOTALS = ("Total due: {total}", "Please pay {total} in all.", "Sum {total}")


def _closed(**properties: Json) -> dict[str, Json]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
SCHEMA = _closed(
    invoice=_closed(number=TEXT, date=TEXT, customer=TEXT),
    items={
        "type": "array",
        "items": _closed(name=TEXT, quantity={"type": "integer"}, unit_price=NUMBER, total=NUMBER),
    },
    total=NUMBER,
)


def invoices(values: Values) -> Sample:
    """One to three line items, consistent to the cent."""
    rng = values.rng
    items: list[dict[str, Json]] = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        quantity = rng.randint(1, 12)
        price = round(rng.randint(1, 90) + rng.choice((0.0, 0.5, 0.25, 0.9, rng.randrange(100) / 100)), 2)
        name = " ".join((values.only(values.pseudo).capitalize(), values.noun()))
        items.append(
            {"name": name, "quantity": quantity, "unit_price": price, "total": round(quantity * price, 2)}
        )
    record: Json = {
        "invoice": {"number": values.code(), "date": values.date(), "customer": values.person()},
        "items": items,
        "total": round(sum(item["total"] for item in items), 2),
    }
    line = rng.choice(LINES)
    text = [rng.choice(HEADS).format(**record["invoice"])]
    text += [line.format(price=item["unit_price"], **item) for item in items]
    text.append(rng.choice(TOTALS).format(total=record["total"]))
    return Sample("invoices", [{"role": "user", "content": "\n".join(text)}], dumps(record), schema=SCHEMA)
