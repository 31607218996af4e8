"""Values from a large combinatorial space, assigned to the two splits by a hash of their text.

The model must be able to copy values that it has not seen: `belongs` assigns every eighth text to the test
split, by CRC-32. So no list has to be stored, and anyone can check both splits.
"""

import datetime
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

from personae.evals.demo import words

Split = Literal["train", "test"]
Value = str | int | float | bool
T = TypeVar("T", bound=Value)
HELD_OUT = 8  # one text in this many belongs to the test split


def belongs(text: str, split: Split) -> bool:
    """Whether an open-class text (value, noun, parameter name) may occur in this split."""
    return (zlib.crc32(text.encode()) % HELD_OUT == 0) == (split == "test")


def text_of(value: Value) -> str:
    """A value as a user writes it, which is also how JSON writes it between its quotes."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Values:
    """Draws values of one split from one random stream."""

    rng: Random
    split: Split
    _kinds: dict[str, Callable[[], Value]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds: dict[str, Callable[[], Value]] = {
            "person": self.person,
            "place": self.place,
            "date": self.date,
            "time": self.time,
            "integer": self.integer,
            "number": self.number,
            "code": self.code,
            "email": self.email,
            "text": self.text,
            "word": self.coined,
        }
        object.__setattr__(self, "_kinds", kinds)

    def pick(self, options: tuple[str, ...]) -> str:
        """One of an open class's members that belong to this split."""
        return self.only(lambda: self.rng.choice(options))

    def only(self, draw: Callable[[], T]) -> T:
        """Draws until the text belongs to this split."""
        while not belongs(text_of(value := draw()), self.split):
            pass
        return value

    def of_kind(self, kind: str) -> Value:
        """A value of a parameter kind (see `words.PARAMETERS`; enums and booleans have none of their own)."""
        return self._kinds[kind]()

    def pseudo(self, low: int = 2, high: int = 3) -> str:
        """A made-up word of some syllables."""
        rng = self.rng
        syllables = (
            rng.choice(words.STARTS) + rng.choice(words.MIDDLES) for _ in range(rng.randint(low, high))
        )
        return "".join(syllables) + (rng.choice(words.ENDS) if rng.random() < 0.6 else "")

    def person(self) -> str:
        """A given name and a surname, now and then a single name."""
        if self.rng.random() < 0.15:
            return self.only(lambda: self.pseudo().capitalize())
        return self.only(lambda: f"{self.pseudo(1, 2).capitalize()} {self.pseudo(2, 3).capitalize()}")

    def place(self) -> str:
        """A town; one in four has two words."""
        if self.rng.random() < 0.25:
            prefix = self.rng.choice(("New", "Old", "Port", "Lake", "Mount", "San"))
            return self.only(lambda: f"{prefix} {self.pseudo().capitalize()}")
        return self.only(lambda: self.pseudo().capitalize())

    def day(self) -> datetime.date:
        """A day of 2024 to 2029."""
        start = datetime.date(2024, 1, 1)
        text = self.only(lambda: (start + datetime.timedelta(days=self.rng.randrange(2192))).isoformat())
        return datetime.date.fromisoformat(text)

    def date(self) -> str:
        """An ISO date."""
        return self.day().isoformat()

    def time(self) -> str:
        """A time of day, HH:MM, on five minutes."""
        return self.only(lambda: f"{self.rng.randrange(24):02d}:{self.rng.randrange(12) * 5:02d}")

    def integer(self) -> int:
        """A positive integer of one to four digits."""
        return self.only(lambda: self.rng.randrange(2, 10 ** self.rng.choice((1, 2, 2, 3, 4)) + 2))

    def number(self) -> float:
        """A positive number with one or two decimals."""
        draw = self.rng.randrange
        return self.only(lambda: round(draw(1, 10 ** self.rng.randint(1, 3)) + draw(1, 100) / 100, 2))

    def code(self) -> str:
        """An identifier such as KX-4821, R77B or 90125."""
        rng = self.rng

        def draw() -> str:
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
            letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
            return rng.choice(
                (f"{letters}-{digits}", f"{letters}{digits}", f"{letters}-{digits}", f"{digits}{letters}")
            )

        return self.only(draw)

    def email(self) -> str:
        """A mail address at a reserved domain."""
        rng = self.rng

        def draw() -> str:
            local = f"{self.pseudo(1, 2)}{rng.choice(('.', '_', ''))}{self.pseudo(1, 2)}"
            return f"{local}@{rng.choice(words.MAIL_HOSTS)}"

        return self.only(draw)

    def text(self) -> str:
        """Two to four words that make a title."""
        rng = self.rng

        def draw() -> str:
            chosen = [rng.choice(words.TEXT_WORDS) for _ in range(rng.randint(2, 4))]
            if rng.random() < 0.3:
                chosen[rng.randrange(len(chosen))] = self.pseudo()
            title = " ".join(chosen)
            return title.capitalize() if rng.random() < 0.5 else title

        return self.only(draw)

    def coined(self) -> str:
        """A word nobody has seen: of syllables, or the head of one listed word and the tail of another.

        Spliced words look like English, so that their pieces cannot be told from those of real words.
        """
        rng = self.rng
        if rng.random() < 0.4:
            return self.only(self.pseudo)

        def draw() -> str:
            head, tail = rng.choice(words.NOUNS), rng.choice(words.NOUNS)
            return head[: rng.randint(1, len(head) - 1)] + tail[rng.randint(1, len(tail) - 1) :]

        return self.only(draw)

    def _listed_or_coined(self, listed: tuple[str, ...], coined: float) -> str:
        """A training word is mostly coined: a small model that knows the list recalls instead of reading."""
        if self.split == "train":
            coined = max(coined, 0.6)
        if self.rng.random() < coined or not any(belongs(word, self.split) for word in listed):
            return self.coined()
        return self.pick(listed)

    def noun(self) -> str:
        """What a tool is about."""
        return self._listed_or_coined(words.NOUNS, 0.5)

    def parameter(self, kind: str) -> str:
        """A parameter name for a kind; some have two parts."""
        name = self._listed_or_coined(words.PARAMETERS[kind], 0.1)
        if self.split == "train" and "_" not in name and self.rng.random() < 0.15:
            parts = (name, self.coined()) if self.rng.random() < 0.5 else (self.coined(), name)
            joined = "_".join(parts)
            return joined if belongs(joined, self.split) else name
        return name

    def options(self) -> list[str]:
        """Two to four distinct enum options."""
        chosen: list[str] = []
        wanted = self.rng.randint(2, 4)
        while len(chosen) < wanted:
            option = self._listed_or_coined(words.OPTIONS, 0.3)
            if option not in chosen:
                chosen.append(option)
        return chosen
