"""Which of a layer's experts the ranks of a group compute, and in which of their slots."""

import torch
from torch import Tensor

from personae.engine.parallel.expert_placement import EMPTY, Placement


class ExpertSlots:
    """The slots of one group. An expert that several groups have is computed by each of them for other
    tokens. Which one computes a token depends only on the token's position, so a row's bits do not depend on
    the other rows of its step."""

    def __init__(self, experts: int, group: int, placement: Placement, device: torch.device) -> None:
        self._experts, self._group, self._device = experts, group, device
        self.place(placement)

    @property
    def own(self) -> tuple[int, ...]:
        """The group's experts by slot."""
        return self.placement[self._group]

    def place(self, placement: Placement) -> None:
        """From now on experts are where the placement says."""
        self.placement = placement
        slots = len(self.own)
        place, copies, turn = ([number] * self._experts for number in (slots, 1, 0))
        for expert in range(self._experts):
            groups = [group for group, own in enumerate(placement) if expert in own]
            copies[expert] = len(groups)
            if self._group in groups:
                place[expert], turn[expert] = self.own.index(expert), groups.index(self._group)
        self._place, self._copies, self._turn = (
            torch.tensor(column, device=self._device) for column in (place, copies, turn)
        )
        self._divided = max(copies) > 1
        self.count = slots

    def of(self, chosen: Tensor, positions: Tensor) -> Tensor:
        """The slots that compute the chosen experts: [T, k] -> [T, k] int64; `count` where that is another
        group's. positions: [T], of the tokens in their sequences."""
        place = self._place[chosen]
        if not self._divided:
            return place
        turn = (positions.unsqueeze(1) + chosen) % self._copies[chosen]
        return place.masked_fill_(turn != self._turn[chosen], self.count)


def arriving(own: tuple[int, ...], coming: tuple[int, ...]) -> dict[int, int]:
    """The slots whose expert changes, with their new expert."""
    return {slot: expert for slot, expert in enumerate(coming) if expert not in (EMPTY, own[slot])}
