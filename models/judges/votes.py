"""Votes of a judge on one shard of completions: questions, rewards and counters. Does not import torch.

The judge gets one question per vote on each completion. It also judges canaries: known-bad answers that must not pass.
Seeds are derived from the purpose of a question, so votes do not depend on the worker or the order of questions.
Counters are sums, so they can be added over shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from infra.errors import Damaged
from models.config.judges import Canaries, JudgeReward
from models.config.verdicts import StepsVerdict
from models.data.rubrics import Rubric
from models.judges.chats import escape
from models.judges.prompts import build_question_text
from models.judges.verdicts import FLAGGED, Judgement, Question, count_votes, flag_weights
from models.records.seeds import derive_seed
from models.text.steps import StepValues, split_steps

CANARY: Final = -1
"""Prompt row that marks a canary in a verdict shard."""


@dataclass(frozen=True, slots=True)
class JudgedCompletion:
    """Completion that a judge must rate, or canary (known-bad answer) with which the judge is tested."""

    prompt_row: int
    sample: int
    prompt: str
    completion: str
    answer: str
    origin: int
    """Index of the prompt in its shard. For a canary, index of the prompt with which the judge sees the canary."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images."""
    episode: tuple[tuple[str, str], ...] = ()
    """Messages of an episode in order, each as role and text: the policy's turns and the environment's answers."""
    chat: str = ""
    """Messages of a prompt that is a chat, with tags (`models.judges.chats`), or empty."""
    rubric: Rubric = ()
    """Criteria by which the completion is judged, or empty."""

    @property
    def is_blank(self) -> bool:
        """Whether the completion is blank. Blank completions are not sent to a judge."""
        return not self.completion.strip()


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote on one completion: a question that may be repeated if the answer is invalid."""

    judged: JudgedCompletion
    vote: int

    def build_questions(
        self, reward: JudgeReward, *, seed_parts: tuple[int | str, ...], attempt: int
    ) -> list[Question]:
        """Build the questions for this vote: one for each criterion if there is a rubric, else a single question."""
        if not self.judged.rubric:
            return [self.build_question(reward, seed_parts=seed_parts, attempt=attempt)]
        return [
            self.build_question(reward, seed_parts=(*seed_parts, number), attempt=attempt, criterion=criterion.text)
            for number, criterion in enumerate(self.judged.rubric)
        ]

    def build_question(
        self, reward: JudgeReward, *, seed_parts: tuple[int | str, ...], attempt: int, criterion: str = ""
    ) -> Question:
        """Build the question for this vote, or for one criterion of a rubric. Each attempt uses a different seed for
        the answer.

        In a user's template, the fence (delimiter) also differs for each attempt. In default templates, all votes on a
        completion use the same fence, so their prompts are equal and are processed only once.
        """
        it = self.judged
        name = "canary" if it.prompt_row == CANARY else "judge"
        seed = derive_seed(name, *seed_parts, it.origin, it.sample, self.vote, attempt)
        fence = derive_seed(name, *seed_parts, it.origin, it.sample) if reward.template is None else seed
        text = build_question_text(
            reward,
            prompt=it.prompt,
            completion=it.completion,
            answer=it.answer,
            seed=fence,
            episode=it.episode,
            marked={"prompt": it.chat, **({"criterion": escape(criterion)} if criterion else {})},
        )
        return Question(text=text, seed=seed, images=it.images if reward.images == "prompt" else ())


def read_episodes(rollouts: pa.Table) -> list[tuple[tuple[str, str], ...]]:
    """Return the messages of each episode after its prompt, or no messages for completions that are not episodes."""
    episodes = []
    for turns, messages in zip(rollouts["turns"].to_pylist(), rollouts["messages"].to_pylist(), strict=True):
        texts = [(each["role"], each["content"]) for each in messages or ()]
        wrote = [place for place, (role, _) in enumerate(texts) if role == "assistant"][-len(turns or ()) :]
        episodes.append(tuple(texts[wrote[0] :]) if turns and wrote else ())
    return episodes


def with_canaries(completions: Sequence[JudgedCompletion], canaries: Canaries | None) -> list[JudgedCompletion]:
    """Return the canaries followed by the completions.

    The canaries are bad answers to the first prompts of the shard.
    """
    return [*(_canaries(completions, canaries) if canaries and completions else ()), *completions]


def _canaries(completions: Sequence[JudgedCompletion], canaries: Canaries) -> Iterator[JudgedCompletion]:
    """Yield the canaries, each combined with a prompt of the shard. Prompts are used in turn."""
    prompts = list({completion.prompt_row: completion for completion in reversed(completions)}.values())[::-1]
    for number in range(canaries.per_shard):
        source = prompts[number % len(prompts)]
        yield JudgedCompletion(
            prompt_row=CANARY,
            sample=number,
            prompt=source.prompt,
            completion=canaries.answers[number % len(canaries.answers)],
            answer=source.answer,
            origin=source.prompt_row,
            images=source.images,
            chat=source.chat,
            rubric=source.rubric,
        )


VotePlace = tuple[int, int]
"""Prompt row and sample, which identify a completion in a verdict shard."""


def tally(
    verdicts: pa.Table, rollouts: pa.Table, *, vote: Literal["mean", "median", "majority"], term: str
) -> list[Judgement]:
    """Return the reward of each completion from the last attempt of each vote, or the error if no vote is valid.

    Raises Damaged if the two tables are not about the same completions.
    """
    return [_count(votes, vote) for votes in _cast(verdicts, rollouts, term)]


def tally_steps(verdicts: pa.Table, rollouts: pa.Table, *, verdict: StepsVerdict, term: str) -> list[StepValues]:
    """Return the step values of each completion from its valid critiques. Without critiques, no step is flagged.

    Raises Damaged if the two tables are not about the same completions.
    """
    texts = rollouts["completion"].to_pylist()
    return [
        step_values(text, [judgement.steps for judgement in votes], verdict)
        for text, votes in zip(texts, _cast(verdicts, rollouts, term), strict=True)
    ]


def step_values(completion: str, critiques: Sequence[Sequence[int] | None], verdict: StepsVerdict) -> StepValues:
    """Combine the critiques of a completion into values of its steps. Critiques that are None are ignored."""
    steps = split_steps(completion, verdict.steps)
    usable = [critique for critique in critiques if critique is not None]
    weights = flag_weights(usable, verdict, num_steps=len(steps))
    return StepValues(tuple(map(len, steps)), tuple(FLAGGED * weight if weight else 0.0 for weight in weights))


def _cast(verdicts: pa.Table, rollouts: pa.Table, term: str) -> list[list[Judgement]]:
    """Return the votes on each completion, in the order of the rollouts. Raises Damaged if the tables do not match."""
    places = list(zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True))
    votes_by_place = _last_attempts(verdicts)
    if set(votes_by_place) != set(places):
        unpaired = min(set(votes_by_place) ^ set(places))
        raise Damaged(
            f"the verdict shard of reward {term} has verdicts on {len(votes_by_place)} completions, but the rollout "
            f"shard has {len(places)} completions. The first that only one of them contains is prompt row "
            f"{unpaired[0]}, sample {unpaired[1]}. Restore both shards from a copy of the run."
        )
    return [votes_by_place[place] for place in places]


def _last_attempts(verdicts: pa.Table) -> dict[VotePlace, list[Judgement]]:
    """Return the last judgement of each vote by completion, without canaries.

    Rows must be ordered by vote and attempt.
    """
    columns = ("prompt_row", "sample", "vote", "value", "error", "steps")
    rows = zip(*(verdicts[name].to_pylist() for name in columns), strict=True)
    last = {
        (row, sample, vote): Judgement(value, error, None if steps is None else tuple(steps))
        for row, sample, vote, value, error, steps in rows
        if row != CANARY
    }
    votes_by_place: dict[VotePlace, list[Judgement]] = {}
    for (row, sample, _), judgement in last.items():
        votes_by_place.setdefault((row, sample), []).append(judgement)
    return votes_by_place


def _count(votes: Sequence[Judgement], vote: Literal["mean", "median", "majority"]) -> Judgement:
    """Combine the votes on a completion into one judgement, which has the last error if no vote is valid."""
    value = count_votes([judgement.value for judgement in votes], vote)
    return Judgement(value, votes[-1].error if value is None else None)


Votes = Mapping[JudgedCompletion, Sequence[Judgement]]
"""Last judgement of each vote on each judged completion or canary."""


def count_answers(votes: Votes, reward: JudgeReward) -> dict[str, float]:
    """Return counts of votes, invalid votes and passed canaries of a shard, which can be added over shards.

    `answers` and `invalid` count votes on completions, not attempts.
    """
    values = [vote.value for judged, cast in votes.items() if judged.prompt_row != CANARY for vote in cast]
    passed = [_passes(judged, cast, reward) for judged, cast in votes.items() if judged.prompt_row == CANARY]
    return {
        "answers": float(len(values)),
        "invalid": float(values.count(None)),
        "canaries": float(len(passed) - passed.count(None)),
        "canaries_passed": float(passed.count(True)),
        **(_count_steps(votes, reward.verdict) if isinstance(reward.verdict, StepsVerdict) else {}),
    }


def _passes(judged: JudgedCompletion, cast: Sequence[Judgement], reward: JudgeReward) -> bool | None:
    """Return whether a canary (known-bad answer) passed, given the judge's votes on it. None if no vote is valid."""
    if reward.canaries is None or all(vote.value is None for vote in cast):
        return None
    if isinstance(reward.verdict, StepsVerdict):
        return not any(step_values(judged.completion, [vote.steps for vote in cast], reward.verdict).values)
    value = count_votes([vote.value for vote in cast], reward.vote)
    return value is not None and value >= reward.canaries.pass_reward


def _count_steps(votes: Votes, verdict: StepsVerdict) -> dict[str, float]:
    """Count completions, completions without a valid critique, and judged, flagged and dropped steps."""
    asked = {judged: cast for judged, cast in votes.items() if judged.prompt_row != CANARY}
    critiques = {judged: [vote.steps for vote in cast] for judged, cast in asked.items()}
    usable = {judged: cast for judged, cast in critiques.items() if any(steps is not None for steps in cast)}
    values = [step_values(judged.completion, cast, verdict).values for judged, cast in usable.items()]
    return {
        "completions": float(len(asked)),
        "unusable": float(len(asked) - len(usable)),
        "steps": float(sum(map(len, values))),
        "flagged_steps": float(sum(value < 0 for row in values for value in row)),
        "dropped_indices": float(sum(vote.dropped for cast in asked.values() for vote in cast)),
    }
