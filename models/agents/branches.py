"""Record of an episode that a program outside drives: the policy's turns and their order as a tree of branches.

A turn is the answer to one request. A branch is a chain of turns in which each request continues the tokens of the turn
before. Sub-agents, equal requests and histories that the program has rewritten begin further branches. This module does
not import torch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from threading import Lock

import numpy as np
from blake3 import blake3

from rheostat.models.engines.protocol import Completion
from rheostat.models.records.model_input import Tokens
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import Segment


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a new turn in an episode: the turn that it continues, and the tokens added after that turn."""

    parent: int | None
    """Number of the turn that the request continues token by token, or None for a new prompt."""
    context: tuple[int, ...]
    """IDs of the tokens between the parent and the new turn, or of the whole prompt if there is no parent."""
    key: str
    """BLAKE3 of all tokens before the new turn, as hexadecimal digits. Requests with equal contexts have equal keys."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn of an episode that a program drives, with the tokens before it."""

    number: int
    """Position in the order in which requests were accepted. Numbers start at 0 and may have gaps."""
    parent: int | None
    """Number of the turn that this turn continues, or None if its context is a whole prompt."""
    context: tuple[int, ...]
    """IDs of the tokens between the parent and this turn, or of the whole prompt if there is no parent."""
    key: str
    """BLAKE3 of all tokens before this turn (`Place.key`)."""
    occurrence: int
    """Index that distinguishes turns of the episode with the same context: the lowest index that no other such turn
    had when this turn was opened."""
    seed: int
    """Random seed with which the turn is sampled."""
    tokens: tuple[int, ...] = ()
    """IDs of the tokens that the policy sampled. Empty while the request waits for the engine."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each sampled token."""
    segments: tuple[Segment, ...] = ()
    """Policy versions that sampled the tokens. There are several if the turn was cut and continued later."""
    finish_reason: FinishReason = FinishReason.CUT
    """Reason why the turn ended. It is `cut` while the turn is unfinished."""
    calls: int = 0
    """Number of tool calls in the turn."""
    errors: int = 0
    """Number of tool calls in the turn that could not be parsed."""
    text: str = ""
    """Text of the turn without its tool calls."""


class EpisodeRecord:
    """Record of the turns of one episode. Several threads may use it concurrently.

    The seed of a turn depends only on the episode's seed, the tokens before the turn and the turn's `occurrence`. It
    does not depend on the order in which other requests arrive.
    """

    def __init__(self, turns: Iterable[RecordedTurn] = ()) -> None:
        """Create a record with the turns of an earlier part of the episode. The default is an empty record."""
        self._lock = Lock()
        self._turns = {turn.number: turn for turn in turns}
        self._next = max(self._turns, default=-1) + 1

    def open_turn(self, place: Place, *, seed: int) -> int:
        """Reserve a turn at a place and return its number. `seed` is the seed of the episode.

        Every opened turn must be extended with tokens or dropped.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            taken = {turn.occurrence for turn in self._turns.values() if turn.key == place.key}
            occurrence = next(each for each in count() if each not in taken)
            turn_seed = derive_seed("request", seed, place.key, occurrence)
            self._turns[number] = RecordedTurn(number, place.parent, place.context, place.key, occurrence, turn_seed)
            return number

    def restore_turn(self, number: int, earlier: RecordedTurn) -> None:
        """Give an opened turn the tokens of an earlier turn with the same context and seed."""
        with self._lock:
            self._turns[number] = replace(
                self._turns[number],
                tokens=earlier.tokens,
                logprobs=earlier.logprobs,
                segments=earlier.segments,
                finish_reason=earlier.finish_reason,
            )

    def extend_turn(self, number: int, completion: Completion, version: int) -> RecordedTurn:
        """Append tokens that policy version `version` sampled to a turn, and return the turn."""
        new = (Segment(policy_version=version, tokens=len(completion.tokens)),) if completion.tokens else ()
        with self._lock:
            turn = self._turns[number]
            self._turns[number] = extended = replace(
                turn,
                tokens=turn.tokens + completion.tokens,
                logprobs=turn.logprobs + completion.logprobs,
                segments=turn.segments + new,
                finish_reason=completion.finish_reason,
            )
            return extended

    def describe_turn(self, number: int, *, text: str, calls: int = 0, errors: int = 0) -> None:
        """Record the text of a turn, the number of its tool calls, and how many of them could not be parsed."""
        with self._lock:
            self._turns[number] = replace(self._turns[number], text=text, calls=calls, errors=errors)

    def drop_turn(self, number: int) -> None:
        """Remove a turn that has no tokens, because its request failed. Turns with tokens stay."""
        with self._lock:
            if not self._turns[number].tokens:
                del self._turns[number]

    def turn(self, number: int) -> RecordedTurn:
        """Return the turn with this number. Raises KeyError if there is none."""
        with self._lock:
            return self._turns[number]

    def turns(self) -> list[RecordedTurn]:
        """Return all turns that have tokens, in the order in which their requests were accepted."""
        with self._lock:
            return [turn for _, turn in sorted(self._turns.items()) if turn.tokens]

    @property
    def num_requests(self) -> int:
        """Number of turns that are recorded or reserved."""
        with self._lock:
            return len(self._turns)

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy sampled in all turns."""
        with self._lock:
            return sum(len(turn.tokens) for turn in self._turns.values())

    def count_tokens_of(self, version: int) -> int:
        """Return the number of tokens that policy version `version` sampled in all turns."""
        with self._lock:
            segments = [segment for turn in self._turns.values() for segment in turn.segments]
            return sum(segment.tokens for segment in segments if segment.policy_version == version)

    def context_of(self, number: int) -> Tokens:
        """Return the IDs of all tokens before a turn, from the start of its prompt."""
        *earlier, turn = self._find_path(number)
        return np.fromiter(chain(_join(earlier), turn.context), np.int32)

    def tokens_of(self, number: int) -> Tokens:
        """Return the IDs of all tokens before a turn and of the turn itself."""
        return np.fromiter(_join(self._find_path(number)), np.int32)

    def _find_path(self, number: int) -> list[RecordedTurn]:
        """Return the turns whose tokens a turn continues, from the start of its prompt, and the turn itself."""
        with self._lock:
            path = [self._turns[number]]
            while path[-1].parent is not None:
                path.append(self._turns[path[-1].parent])
        return path[::-1]

    def branches(self) -> list[list[RecordedTurn]]:
        """Return all turns with tokens as branches, each turn once, in the order of the branches' first turns.

        A turn belongs to the branch of its parent if it is the parent's first child. Otherwise it begins a branch. The
        prompt of a branch is `context_of` its first turn, which contains the tokens of earlier turns if the branch
        continues another one.
        """
        turns = self.turns()
        num_children: Counter[int | None] = Counter()
        branches: list[list[RecordedTurn]] = []
        branch_of: dict[int, list[RecordedTurn]] = {}
        for turn in turns:
            num_children[turn.parent] += 1
            if turn.parent is not None and num_children[turn.parent] == 1:
                branch = branch_of[turn.parent]
            else:
                branches.append(branch := [])
            branch.append(turn)
            branch_of[turn.number] = branch
        return branches

    def place_after(self, parent: int | None, context: Sequence[int]) -> Place:
        """Return the place of a turn that follows the tokens `context` after the turn `parent`, or a new prompt if
        `parent` is None."""
        own = np.asarray(context, np.int32)
        whole = own if parent is None else np.concatenate([self.tokens_of(parent), own])
        return Place(parent, tuple(map(int, context)), blake3(whole.tobytes()).hexdigest())


def _join(path: Sequence[RecordedTurn]) -> Iterator[int]:
    """Return the IDs of the contexts and tokens of turns that continue each other."""
    return chain.from_iterable((*turn.context, *turn.tokens) for turn in path)
