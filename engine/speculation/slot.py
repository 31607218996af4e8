"""The state of speculation for one running sequence: its position, its proposers, and its end."""

from collections.abc import Sequence

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.proposer import Draft, Proposer


class SlotState:
    """`tokens` are the log's and those emitted since. The next row begins at `position`, None before the
    first. The first proposer that has a guess wins."""

    def __init__(self, log: SequenceLog, proposers: Sequence[Proposer]) -> None:
        params = log.params
        self.tokens = list(log.tokens)
        self.position: int | None = None
        self._proposers = proposers
        self._known = len(self.tokens)  # how many tokens the proposers know: they learn the others when asked
        self._stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else log.eos)
        self._stop_after = log.prompt_length + params.min_tokens

    def brought(self, computed: int, tokens: Sequence[int]) -> None:
        """A row was right about `computed` positions and emitted these tokens."""
        assert self.position is not None
        self.position += computed
        self.tokens += tokens

    def propose(self, most: int) -> Draft | None:
        """A guess of at most `most` tokens."""
        if self._known < len(self.tokens):
            new = self.tokens[self._known :]
            self._known = len(self.tokens)
            for proposer in self._proposers:
                proposer.extend(new)
        for proposer in self._proposers:
            if (draft := proposer.propose(most)) is not None:
                return draft
        return None

    def ends(self, position: int, token: int) -> bool:
        """Whether the token at a position may be the sequence's last. Drafts after it are not verified."""
        return position >= self._stop_after and token in self._stops
