"""A database's tables and a question to a query that SQLite runs. Train and test share no table."""

import json
import random
import sqlite3
from typing import Any, NamedTuple

from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tools import held_out, value_of

SYSTEM = "Answer with one SQLite query for the question, and nothing else."
# name: thing in the singular; label column; text columns; number columns; parent table, if there is one
THEMES = """
employees: employee; name:person; department:enum(sales,support,research), city:city; salary:int(2000-9000), age:int(20-65); offices
offices: office; city:city; country:country; floors:int(1-40), rent:int(500-9000)
books: book; title:book; genre:enum(novel,poetry,history), language:language; pages:int(80-900), year:int(1900-2024); publishers
publishers: publisher; name:company; country:country; founded:int(1850-2015), staff:int(3-900)
players: player; name:person; position:enum(goalkeeper,defender,striker), country:country; goals:int(0-40), age:int(17-40); clubs
clubs: club; name:team; city:city; founded:int(1880-2010), members:int(100-9000)
orders: order; customer:person; status:enum(open,shipped,cancelled), city:city; amount:int(5-900), quantity:int(1-20); shops
shops: shop; name:company; city:city; size:int(20-900), opened:int(1980-2024)
flights: flight; code:code; destination:city, status:enum(delayed,boarding,landed); distance:int(100-9000), seats:int(20-400); airlines
airlines: airline; name:company; country:country; planes:int(3-400), founded:int(1930-2020)
patients: patient; name:person; illness:illness, city:city; age:int(1-95), visits:int(1-30); doctors
doctors: doctor; name:person; specialty:enum(surgery,dentistry,pediatrics); experience:int(1-40), fee:int(30-400)
films: film; title:film; genre:enum(drama,comedy,thriller), country:country; minutes:int(70-200), year:int(1930-2024); directors
directors: director; name:person; country:country; born:int(1900-1995), awards:int(0-20)
cars: car; model:vehicle; color:color, fuel:enum(petrol,diesel,electric); price:int(2000-90000), year:int(1995-2024); dealers
dealers: dealer; name:company; city:city; rating:int(1-5), stock:int(3-300)
students: student; name:person; subject:enum(physics,law,medicine), city:city; grade:int(40-100), semester:int(1-12); schools
schools: school; name:word; city:city; founded:int(1700-2015), rooms:int(5-200)
songs: song; title:song; genre:genre, language:language; seconds:int(90-500), plays:int(10-90000); singers
singers: singer; name:artist; country:country; born:int(1930-2003), albums:int(1-30)
animals: animal; name:first; species:animal, color:color; weight:int(1-900), age:int(1-30); zoos
zoos: zoo; name:word; city:city; area:int(5-400), visitors:int(100-90000)
products: product; name:product; category:enum(home,garden,sport), color:color; price:int(2-900), stock:int(0-400); suppliers
suppliers: supplier; name:company; country:country; rating:int(1-5), since:int(1980-2024)
meals: meal; name:dish; cuisine:cuisine, diet:enum(vegan,vegetarian,meat); price:int(4-60), calories:int(100-1500); restaurants
restaurants: restaurant; name:company; city:city; stars:int(1-5), tables:int(4-80)
houses: house; street:street; city:city, kind:enum(villa,flat,farm); price:int(50000-900000), rooms:int(1-12); agents
agents: agent; name:person; city:city; sales:int(0-90), commission:int(1-9)
trees: tree; species:plant; health:enum(good,poor,dead), city:city; height:int(1-60), age:int(1-400); parks
parks: park; name:word; city:city; area:int(1-900), benches:int(2-200)
paintings: painting; title:book; style:enum(realism,cubism,baroque), color:color; price:int(100-90000), year:int(1500-2020); painters
painters: painter; name:painter; country:country; born:int(1450-1990), works:int(3-900)
courses: course; title:topic; level:enum(beginner,advanced), language:language; hours:int(2-90), fee:int(0-900); teachers
teachers: teacher; name:person; city:city; experience:int(1-40), salary:int(1500-7000)
games: game; title:game; platform:enum(pc,console,mobile), genre:enum(puzzle,racing,strategy); price:int(1-80), score:int(1-100); studios
studios: studio; name:company; country:country; staff:int(2-900), founded:int(1980-2022)
crops: crop; name:crop; season:enum(spring,summer,autumn), quality:enum(high,low); tons:int(1-900), price:int(50-900); farms
farms: farm; name:word; state:state; hectares:int(2-900), workers:int(1-90)
tickets: ticket; buyer:person; seat:enum(front,middle,back), status:enum(paid,reserved); price:int(5-300), discount:int(0-50); concerts
concerts: concert; artist:artist; city:city; visitors:int(50-90000), year:int(1990-2025)
machines: machine; code:code; state:enum(running,stopped,broken), material:material; hours:int(1-9000), power:int(1-500); factories
factories: factory; name:company; country:country; workers:int(5-900), opened:int(1900-2020)
parcels: parcel; code:code; status:enum(sent,delivered,lost), country:country; weight:int(1-60), cost:int(3-200); couriers
couriers: courier; name:person; city:city; trips:int(1-900), rating:int(1-5)
"""


class Table(NamedTuple):
    """A table: its columns by name with their kinds of values."""

    name: str
    one: str
    label: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    kinds: dict[str, str]
    parent: str

    @property
    def link(self) -> str:
        """The column that names the parent's row."""
        return TABLES[self.parent].one + "_id"


def _table(line: str) -> Table:
    name, rest = line.split(": ", 1)
    one, label, texts, numbers, *parent = rest.split("; ")
    # enum(a,b) holds commas without blanks, lists of columns have blanks
    columns = [[part.split(":", 1) for part in text.split(", ")] for text in (label, texts, numbers)]
    kinds = {key: kind for part in columns for key, kind in part}
    labels, text_names, number_names = ([key for key, _ in part] for part in columns)
    return Table(
        name, one, labels[0], tuple(text_names), tuple(number_names), kinds, parent[0] if parent else ""
    )


TABLES = {table.name: table for table in map(_table, THEMES.strip().splitlines())}


def _pairs(*, test: bool) -> list[Table]:
    """The tables with a parent, of a split: the parent goes with them."""
    return [table for table in TABLES.values() if table.parent and held_out(table.name) is test]


def create(tables: list[Table]) -> str:
    """The statements that make the tables."""
    return "\n".join(_create(table, linked=table.parent in {one.name for one in tables}) for table in tables)


def _create(table: Table, *, linked: bool) -> str:
    columns = ["id INTEGER", f"{table.label} TEXT", *(f"{c} TEXT" for c in table.texts)]
    columns += [f"{c} INTEGER" for c in table.numbers]
    if linked:
        columns.append(f"{table.link} INTEGER")
    return f"CREATE TABLE {table.name} ({', '.join(columns)});"


def fill(tables: list[Table], rng: random.Random) -> list[str]:
    """Statements that fill them."""
    made = []
    for table in tables:
        linked = table.parent in {one.name for one in tables}
        for number in range(1, 31 if table.parent else 9):
            row: list[Any] = [number]
            row += [value_of(table.kinds[c], rng).json for c in (table.label, *table.texts, *table.numbers)]
            if linked:
                row.append(rng.randint(1, 8))
            shown = ", ".join("'" + v.replace("'", "''") + "'" if isinstance(v, str) else str(v) for v in row)
            made.append(f"INSERT INTO {table.name} VALUES ({shown});")
    return made


def run(engine_spec: list[str], query: str) -> list[tuple[Any, ...]] | None:
    """What a query gives in a fresh database; None if it fails or takes too long."""
    with sqlite3.connect(":memory:") as database:
        database.executescript("\n".join(engine_spec))
        database.set_progress_handler(_Steps(), 1000)
        try:
            return database.execute(query).fetchmany(1000)
        except (sqlite3.Error, sqlite3.Warning):
            return None


class _Steps:
    """Ends a query after some millions of steps."""

    def __init__(self) -> None:
        self._left = 5000

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def same(one: list[tuple[Any, ...]] | None, other: list[tuple[Any, ...]] | None, query: str) -> bool:
    """Whether two results are the same; in any order where the query does not ask for one."""
    if one is None or other is None:
        return False
    if "ORDER BY" in query:
        return one == other
    return sorted(map(repr, one)) == sorted(map(repr, other))


def _quoted(value: Any) -> str:
    return "'" + str(value).replace("'", "''") + "'" if isinstance(value, str) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def question(table: Table, parent: Table | None, rng: random.Random) -> tuple[str, str]:
    """A question and its query."""
    kinds = [
        "list",
        "count",
        "most",
        "top",
        "aggregate",
        "group",
        "distinct",
        "two",
        "having",
        "above",
        "order",
    ]
    if parent is not None:
        kinds += ["join", "join_count", "join_filter", "join_group", "join"]
    return _QuestionMaker(table, parent, rng).ask(rng.choice(kinds))


class _QuestionMaker:
    def __init__(self, table: Table, parent: Table | None, rng: random.Random) -> None:
        self.t, self.p, self.rng = table, parent, rng
        self.columns = (table.label, *table.texts, *table.numbers)

    def ask(self, kind: str) -> tuple[str, str]:
        text, query = getattr(self, "_" + kind)()
        return text[:1].upper() + text[1:], query + ";"

    def _pick(self, *ways: str) -> str:
        return self.rng.choice(ways)

    def _filter(self, table: Table | None = None) -> tuple[str, str]:
        """A condition in words and in SQL."""
        t = table or self.t
        if self.rng.random() < 0.5:
            c = self.rng.choice(t.texts)
            value = value_of(t.kinds[c], self.rng).json
            return self._pick(
                f"whose {_words(c)} is {value}", f"with {_words(c)} {value}"
            ), f"{c} = {_quoted(value)}"
        c = self.rng.choice(t.numbers)
        value = value_of(t.kinds[c], self.rng).json
        words, sign = self.rng.choice(
            (("more than", ">"), ("less than", "<"), ("at least", ">="), ("at most", "<="), ("exactly", "="))
        )
        return self._pick(
            f"with {words} {value} {_words(c)}", f"whose {_words(c)} is {words} {value}"
        ), f"{c} {sign} {value}"

    def _shown(self) -> tuple[str, str]:
        names = self.rng.sample(self.columns, self.rng.choice((1, 1, 2)))
        if self.rng.random() < 0.15:
            return "everything about", "*"
        return "the " + " and ".join(map(_words, names)) + " of", ", ".join(names)

    def _list(self) -> tuple[str, str]:
        (said, sql), (words, where) = self._shown(), self._filter()
        text = self._pick(f"show {said} all {self.t.name} {words}.", f"list {said} the {self.t.name} {words}.",
                          f"give me {said} {self.t.name} {words}.")  # fmt: skip
        return text, f"SELECT {sql} FROM {self.t.name} WHERE {where}"

    def _above(self) -> tuple[str, str]:
        c, name = self.rng.choice(self.t.numbers), self.t.label
        words, sign = self.rng.choice((("above", ">"), ("below", "<")))
        text = self._pick(f"which {self.t.name} have a {_words(c)} {words} the average? Show the {_words(name)}.",
                          f"list the {_words(name)} of {self.t.name} with {_words(c)} {words} average.")  # fmt: skip
        return text, f"SELECT {name} FROM {self.t.name} WHERE {c} {sign} (SELECT AVG({c}) FROM {self.t.name})"

    def _order(self) -> tuple[str, str]:
        (said, sql), c = self._shown(), self.rng.choice(self.t.numbers)
        words, way = self.rng.choice((("ascending", ""), ("descending", " DESC")))
        text = self._pick(f"show {said} all {self.t.name}, sorted by {_words(c)}, {words}.",
                          f"list {said} the {self.t.name} in {words} order of {_words(c)}.")  # fmt: skip
        return text, f"SELECT {sql} FROM {self.t.name} ORDER BY {c}{way}"

    def _count(self) -> tuple[str, str]:
        words, where = self._filter()
        text = self._pick(f"how many {self.t.name} are there {words}?", f"count the {self.t.name} {words}.",
                          f"what is the number of {self.t.name} {words}?")  # fmt: skip
        return text, f"SELECT COUNT(*) FROM {self.t.name} WHERE {where}"

    def _two(self) -> tuple[str, str]:
        (said, sql), (first, a), (second, b) = self._shown(), self._filter(), self._filter()
        words, sign = self.rng.choice((("and", "AND"), ("or", "OR")))
        return (
            f"show {said} {self.t.name} {first} {words} {second}.",
            f"SELECT {sql} FROM {self.t.name} WHERE {a} {sign} {b}",
        )

    def _most(self) -> tuple[str, str]:
        c, name = self.rng.choice(self.t.numbers), self.t.label
        words, way = self.rng.choice(
            (("highest", " DESC"), ("lowest", ""), ("largest", " DESC"), ("smallest", ""))
        )
        text = self._pick(f"which {self.t.one} has the {words} {_words(c)}?",
                          f"what is the {_words(name)} of the {self.t.one} with the {words} {_words(c)}?")  # fmt: skip
        return text, f"SELECT {name} FROM {self.t.name} ORDER BY {c}{way} LIMIT 1"

    def _top(self) -> tuple[str, str]:
        (said, sql), c, n = self._shown(), self.rng.choice(self.t.numbers), self.rng.randint(2, 9)
        words, way = self.rng.choice((("highest", " DESC"), ("lowest", "")))
        text = self._pick(f"show {said} the {n} {self.t.name} with the {words} {_words(c)}.",
                          f"list {said} the {n} {self.t.name} of {words} {_words(c)}.")  # fmt: skip
        return text, f"SELECT {sql} FROM {self.t.name} ORDER BY {c}{way} LIMIT {n}"

    def _function(self) -> tuple[str, str]:
        return self.rng.choice((("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN")))

    def _aggregate(self) -> tuple[str, str]:
        (said, function), c = self._function(), self.rng.choice(self.t.numbers)
        if self.rng.random() < 0.4:
            text = self._pick(
                f"what is the {said} {_words(c)} of all {self.t.name}?",
                f"compute the {said} {_words(c)} of the {self.t.name}.",
            )
            return text, f"SELECT {function}({c}) FROM {self.t.name}"
        words, where = self._filter()
        text = self._pick(
            f"what is the {said} {_words(c)} of {self.t.name} {words}?",
            f"find the {said} {_words(c)} of all {self.t.name} {words}.",
        )
        return text, f"SELECT {function}({c}) FROM {self.t.name} WHERE {where}"

    def _group(self) -> tuple[str, str]:
        by = self.rng.choice(self.t.texts)
        if self.rng.random() < 0.5:
            text = self._pick(
                f"how many {self.t.name} are there per {_words(by)}?",
                f"count the {self.t.name} of each {_words(by)}.",
            )
            return text, f"SELECT {by}, COUNT(*) FROM {self.t.name} GROUP BY {by}"
        (said, function), c = self._function(), self.rng.choice(self.t.numbers)
        text = self._pick(
            f"what is the {said} {_words(c)} of {self.t.name} per {_words(by)}?",
            f"show the {said} {_words(c)} of {self.t.name} for each {_words(by)}.",
        )
        return text, f"SELECT {by}, {function}({c}) FROM {self.t.name} GROUP BY {by}"

    def _having(self) -> tuple[str, str]:
        by, n = self.rng.choice(self.t.texts), self.rng.randint(1, 9)
        text = self._pick(
            f"for which {_words(by)} are there more than {n} {self.t.name}?",
            f"list each {_words(by)} with more than {n} {self.t.name}.",
        )
        return text, f"SELECT {by} FROM {self.t.name} GROUP BY {by} HAVING COUNT(*) > {n}"

    def _distinct(self) -> tuple[str, str]:
        c = self.rng.choice(self.t.texts)
        if self.rng.random() < 0.5:
            return self._pick(
                f"how many different values of {_words(c)} do the {self.t.name} have?",
                f"count the different {_words(c)} values of {self.t.name}.",
            ), (f"SELECT COUNT(DISTINCT {c}) FROM {self.t.name}")
        return self._pick(
            f"which different values of {_words(c)} are there among the {self.t.name}?",
            f"list every {_words(c)} of {self.t.name} once.",
        ), (f"SELECT DISTINCT {c} FROM {self.t.name}")

    def _joined(self) -> str:
        assert self.p is not None
        return f"{self.t.name} JOIN {self.p.name} ON {self.t.name}.{self.t.link} = {self.p.name}.id"

    def _join(self) -> tuple[str, str]:
        assert self.p is not None
        text = self._pick(f"show the {_words(self.t.label)} of each {self.t.one} with the {_words(self.p.label)} of its {self.p.one}.",
                          f"list all {self.t.name}: their {_words(self.t.label)} and the {_words(self.p.label)} of their {self.p.one}.")  # fmt: skip
        return (
            text,
            f"SELECT {self.t.name}.{self.t.label}, {self.p.name}.{self.p.label} FROM {self._joined()}",
        )

    def _condition(self) -> tuple[str, str]:
        assert self.p is not None
        words, where = self._filter(self.p)
        return words, f"{self.p.name}.{where}"

    def _join_filter(self) -> tuple[str, str]:
        assert self.p is not None
        words, where = self._condition()
        text = self._pick(f"show the {_words(self.t.label)} of {self.t.name} of a {self.p.one} {words}.",
                          f"which {self.t.name} belong to a {self.p.one} {words}? Give the {_words(self.t.label)}.")  # fmt: skip
        return text, f"SELECT {self.t.name}.{self.t.label} FROM {self._joined()} WHERE {where}"

    def _join_count(self) -> tuple[str, str]:
        assert self.p is not None
        words, where = self._condition()
        return (
            f"how many {self.t.name} belong to a {self.p.one} {words}?",
            f"SELECT COUNT(*) FROM {self._joined()} WHERE {where}",
        )

    def _join_group(self) -> tuple[str, str]:
        assert self.p is not None
        by = f"{self.p.name}.{self.p.label}"
        if self.rng.random() < 0.5:
            text = self._pick(
                f"how many {self.t.name} does each {self.p.one} have? Show the {_words(self.p.label)} too.",
                f"count the {self.t.name} per {self.p.one}, by {_words(self.p.label)}.",
            )
            return text, f"SELECT {by}, COUNT(*) FROM {self._joined()} GROUP BY {by}"
        (said, function), c = self._function(), self.rng.choice(self.t.numbers)
        text = f"what is the {said} {_words(c)} of the {self.t.name} of each {self.p.one}? Show the {_words(self.p.label)} too."
        return text, f"SELECT {by}, {function}({self.t.name}.{c}) FROM {self._joined()} GROUP BY {by}"


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """One or two tables and several questions."""
    table = rng.choice(_pairs(test=test))
    parent = TABLES[table.parent]
    alone = rng.random() < 0.3
    if alone and rng.random() < 0.3:
        table = parent
    tables = [table] if alone else [table, parent]
    engine_spec = [create(tables)]
    made: list[Turn] = []
    filled = [*engine_spec, *fill(tables, rng)] if test else []
    while len(made) < turns:
        text, query = question(table, None if alone else parent, rng)
        if test and run(filled, query) in ([], [(0,)], [(None,)]):
            continue  # a wrong query would give the same
        facts = {"script": filled, "query": query}
        made.append(Turn(f"{engine_spec[0]}\n\n{text}", query, facts=facts))
    return Scene("sql", [], SYSTEM, made)


def right(answer: str, turn: Turn) -> bool:
    """Whether the answer gives what the right query gives."""
    query = answer.strip().removeprefix("```sql").removeprefix("```").removesuffix("```").strip()
    return same(
        run(turn.facts["script"], query), run(turn.facts["script"], turn.facts["query"]), turn.facts["query"]
    )


def dump(turn: Turn) -> str:
    """For people: question and query."""
    return json.dumps([turn.user, turn.text])
