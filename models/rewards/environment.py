"""Rewards and failures reported by the environments of episodes. Torch-free."""

from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from rheostat.models.config.reward_terms import EnvironmentReward
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.rollouts.groups import ChatMessage, TurnRecord
from rheostat.models.text.steps import Spans


def read_turns(rollouts: pa.Table) -> list[tuple[TurnRecord, ...]]:
    """Read the records of the turns of each completion in a rollout table. A completion that is not an episode has no
    turns."""
    return [tuple(TurnRecord(**turn) for turn in turns or ()) for turns in rollouts["turns"].to_pylist()]


def find_turn_starts(turns: Sequence[TurnRecord]) -> tuple[int, ...]:
    """Return the index of the first token of each turn. The observation after a turn belongs to this turn."""
    lengths = [turn.tokens + turn.observation for turn in turns]
    return tuple(accumulate(lengths[:-1], initial=0)) if lengths else ()


def find_turn_texts(turns: Sequence[TurnRecord], messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return the text that the policy generated in each turn of an episode. `messages` are those of the episode, from
    which the texts are read if the turns contain none."""
    if any(turn.text is not None for turn in turns):
        return tuple(turn.text or "" for turn in turns)
    return tuple([each["content"] for each in messages if each["role"] == "assistant"][-len(turns) :] if turns else ())


def find_failures(episodes: Sequence[Sequence[TurnRecord]]) -> list[str | None]:
    """Return, for each episode, the error with which its environment failed, or None if it did not fail."""
    return [next((turn.error for turn in turns if turn.error is not None), None) for turns in episodes]


def environment_rewards(episodes: Sequence[Sequence[TurnRecord]], reward: EnvironmentReward) -> list[Judgement | Spans]:
    """Return the reward that the environment gave to each episode or, as configured, to each of its turns. If the
    environment gave no reward, the reward is 0."""
    return [_read_reward(turns, reward) for turns in episodes]


def _read_reward(turns: Sequence[TurnRecord], reward: EnvironmentReward) -> Judgement | Spans:
    """Return the environment's reward of one episode. If the reward scores turns, return the discounted sum of rewards
    from each turn on, in order of time."""
    places = sort_by_time(turns)
    if reward.per == "completion":
        numbers = [each for place in places if (each := turns[place].reward) is not None] or [0.0]
        return Judgement(sum(numbers) if reward.aggregate == "sum" else numbers[-1], None)
    returns = returns_to_go([turns[place].reward or 0.0 for place in places], reward.gamma)
    values = dict(zip(places, returns, strict=True))
    return Spans(find_turn_starts(turns), tuple(values[place] for place in range(len(turns))))


def sort_by_time(turns: Sequence[TurnRecord]) -> list[int]:
    """Return the indices of turns in order of time. The turns of an agent's episode are stored branch after branch, and
    those of other episodes in order of time."""
    return sorted(range(len(turns)), key=lambda place: turns[place].order or 0)


def returns_to_go(rewards: Sequence[float], gamma: float) -> tuple[float, ...]:
    """Return the discounted return of each turn: the turn's reward plus gamma times the return of the next turn.

    >>> returns_to_go([1.0, 0.0, 4.0], 0.5)
    (2.0, 2.0, 4.0)
    """
    return tuple(accumulate(reversed(rewards), lambda later, now: now + gamma * later))[::-1]
