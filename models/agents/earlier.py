"""Replay of the stored turns of an episode that continues in a later iteration.

An agent starts again in every iteration in which its episode continues. A request with the same context as a stored
turn returns the stored turn. A stored turn that was cut continues from its tokens. This module does not import torch.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rheostat.models.agents.branches import EpisodeRecord, RecordedTurn
from rheostat.models.records.schemas import FinishReason


class EarlierTurns:
    """Turns that an episode had at the end of the iteration before. Several threads may use it concurrently."""

    def __init__(
        self,
        turns: Sequence[RecordedTurn] = (),
        *,
        decode: Callable[[Sequence[int]], str] = lambda _: "",
        ends: Collection[int] = (),
    ) -> None:
        """Create the turns from those of a stored record. `decode` returns the text of tokens without special tokens,
        and `ends` are the IDs of the tokens that end turns of the policy."""
        self._turns = {(turn.key, turn.occurrence): turn for turn in turns}
        self._decode, self._ends = decode, frozenset(ends)
        self._used: dict[int, int] = {}
        """Number in the present record of each stored turn that was requested again, by its stored number."""

    def find(self, opened: RecordedTurn, record: EpisodeRecord, *, stop: Sequence[str], max_tokens: int) -> str | None:
        """Copy the stored turn with the same context into an opened turn of the present record, and return its text.
        Return None if there is no such turn, or if these stop texts and `max_tokens` would have ended it elsewhere."""
        found = self._turns.get((opened.key, opened.occurrence))
        if found is None or _is_older_than_parent(found, opened, record):
            return None
        if not is_possible_length(len(found.tokens), found.finish_reason, max_tokens=max_tokens):
            return None
        text = self._decode(found.tokens)
        ends_by_text = found.finish_reason is FinishReason.STOP and found.tokens[-1] not in self._ends
        if any(each in text for each in stop) != ends_by_text:
            return None
        record.restore_turn(opened.number, found)
        self._used[found.number] = opened.number
        return text

    @property
    def num_unused(self) -> int:
        """Number of stored turns that the agent has not requested again."""
        return len(self._turns) - len(self._used)

    def add_unused(self, turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
        """Return the turns of the present iteration, followed by the stored turns that the agent has not requested
        again. A stored turn is omitted if its request was sampled again, or if its parent was omitted. Added turns get
        new numbers."""
        merged, numbers = [*turns], dict(self._used)
        present = {(turn.key, turn.occurrence) for turn in turns}
        for name, turn in self._turns.items():
            if turn.number in numbers or name in present or (turn.parent is not None and turn.parent not in numbers):
                continue
            number = max((each.number for each in merged), default=-1) + 1
            numbers[turn.number] = number
            parent = None if turn.parent is None else numbers[turn.parent]
            merged.append(replace(turn, number=number, parent=parent))
        return merged


def is_possible_length(num_tokens: int, finish_reason: FinishReason, *, max_tokens: int) -> bool:
    """Return whether sampling with at most `max_tokens` tokens could give this number of tokens with this finish
    reason."""
    match finish_reason:
        case FinishReason.STOP:
            return num_tokens <= max_tokens
        case FinishReason.CUT:
            return num_tokens < max_tokens
        case _:
            return num_tokens == max_tokens


def _is_older_than_parent(found: RecordedTurn, opened: RecordedTurn, record: EpisodeRecord) -> bool:
    """Return whether the stored turn `found` comes from an older policy version than the parent of `opened`. This
    happens if the parent was sampled again."""
    if opened.parent is None:
        return False
    return record.turn(opened.parent).segments[-1].policy_version > found.segments[0].policy_version
