"""Work that gives way: background sequences (batches) run in the room that the others leave.

Three rules, each in its place. `Tiers` says who is admitted: a background sequence only when no other waits.
`Allowance` says how much of a step it gets: what is left, and little while others are about, since every row
makes the step longer for all of its rows. And when others wait for a seat, the scheduler takes those of
background sequences back; they wait again with what they have emitted, their pages stay in the prefix cache.

It does not wait for ever: see `Tiers`; and a background sequence that runs has a row in every step that its
allowance reaches, the oldest first.
"""

from personae.engine.fairness import FairnessPolicy, Key


class Tiers:
    """A fairness policy made of two: `background` keys have their turn when no others wait.

    Or when the others were served `patience` tokens since a background key was served one, and it has waited
    all the while: then one background sequence goes first, and keeps its seat.
    """

    def __init__(
        self, foreground: FairnessPolicy, background: FairnessPolicy, patience: int = 16_384
    ) -> None:
        self._policies = (foreground, background)
        self._patience = patience
        self._waiting: tuple[set[Key], set[Key]] = (set(), set())
        self._passed = 0  # tokens served to others while background keys waited

    def offer(self, key: Key, order: int) -> None:
        """To its tier."""
        self._waiting[key.background].add(key)
        self._policies[key.background].offer(key, order)

    def withdraw(self, key: Key) -> None:
        """From its tier."""
        self._waiting[key.background].remove(key)
        self._policies[key.background].withdraw(key)

    def choose(self) -> Key:
        """The tier whose turn it is chooses."""
        foreground, background = self._waiting
        turn = bool(background) and (not foreground or self._passed >= self._patience)
        return self._policies[turn].choose()

    def charge(self, key: Key, input_tokens: int, output_tokens: int) -> None:
        """Count in its tier, and how long the lower one has been passed over."""
        if key.background or not self._waiting[True]:
            self._passed = 0
        else:
            self._passed += input_tokens + output_tokens
        self._policies[key.background].charge(key, input_tokens, output_tokens)

    def forget(self, key: Key) -> None:
        """In its tier."""
        self._policies[key.background].forget(key)

    def gap(self) -> float:
        """Of the others: background keys may wait for long."""
        return self._policies[False].gap()


class Allowance:
    """Tokens that background sequences may have of a step of at most `tokens`.

    All of them, unless others run or wait or did so within the last `quiet` steps: then `beside`. A request
    that comes while a step runs has to wait for it, so steps stay short as long as more may come.
    """

    def __init__(self, tokens: int, beside: int | None = None, quiet: int = 256) -> None:
        self._tokens = tokens
        self._beside = max(tokens // 64, 1) if beside is None else beside
        self._quiet = quiet
        self._alone = quiet  # steps since others were there

    def of(self, others: bool) -> int:
        """For the step that is being planned; `others`: whether any run or wait."""
        return self._beside if others or self._alone < self._quiet else self._tokens

    def stepped(self, others: bool) -> None:
        """That step was made."""
        self._alone = 0 if others else self._alone + 1
