"""Boolean functions in a unique form: reduced ordered binary decision diagrams."""

FALSE, TRUE = 0, 1


class Decisions:
    """Functions of numbered variables, as numbers. Equal functions have the same number."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, int]] = [(-1, 0, 0), (-1, 1, 1)]
        """For each function: its variable, the function if the variable is false, and the function if it is
        true."""
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._known: dict[tuple[int, int, int], int] = {}

    def variable(self, number: int) -> int:
        """The function that is the variable itself."""
        return self._node(number, FALSE, TRUE)

    def opposite(self, one: int) -> int:
        """True where `one` is not."""
        return self.choose(one, FALSE, TRUE)

    def both(self, one: int, other: int) -> int:
        """True where both are."""
        return self.choose(one, other, FALSE)

    def either(self, one: int, other: int) -> int:
        """True where one is."""
        return self.choose(one, TRUE, other)

    def choose(self, condition: int, one: int, other: int) -> int:
        """`one` where `condition` is true, `other` where it is not."""
        if condition <= TRUE or one == other:
            return one if condition else other
        if (one, other) == (TRUE, FALSE):
            return condition
        key = condition, one, other
        if key not in self._known:
            top = min(self.nodes[each][0] for each in key if each > TRUE)
            low = self.choose(*(self._given(each, top, value=False) for each in key))
            high = self.choose(*(self._given(each, top, value=True) for each in key))
            self._known[key] = self._node(top, low, high)
        return self._known[key]

    def _given(self, one: int, variable: int, *, value: bool) -> int:
        found, low, high = self.nodes[one]
        if one <= TRUE or found != variable:
            return one
        return high if value else low

    def _node(self, variable: int, low: int, high: int) -> int:
        if low == high:
            return low
        key = variable, low, high
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(key)
        return self._numbers[key]
