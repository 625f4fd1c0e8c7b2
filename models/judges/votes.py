"""Votes of a judge on one shard of completions: questions, rewards and counters. Does not import torch.

The judge gets one question per vote on each completion. It also judges canaries: known-bad answers that must not pass.
Seeds are derived from the purpose of a question, so votes do not depend on the worker or the order of questions.
Counters are sums, so they can be added over shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from rheostat.infra.counts import format_count
from rheostat.infra.errors import Damaged
from rheostat.models.config.judges import Canaries, JudgeReward
from rheostat.models.config.reward_terms import Segmentation
from rheostat.models.config.verdicts import StepsVerdict
from rheostat.models.data.rubrics import Rubric
from rheostat.models.judges.chats import escape
from rheostat.models.judges.prompts import build_question_text
from rheostat.models.judges.verdicts import FLAGGED, Judgement, Question, count_votes, flag_weights
from rheostat.models.records.seeds import derive_seed
from rheostat.models.text.steps import StepValues, split_steps

CANARY: Final = -1
"""Value of the column `prompt_row` that marks a canary (known-bad answer) in a verdict shard."""


@dataclass(frozen=True, slots=True)
class JudgedCompletion:
    """Completion that a judge must rate, or canary: a known-bad answer mixed in to test the judge."""

    prompt_row: int
    sample: int
    prompt: str
    completion: str
    answer: str
    origin: int
    """Row of the prompt in the list of prompts. For a canary, the row of the prompt to which the known-bad answer is
    attached."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images."""
    episode: tuple[tuple[str, str], ...] = ()
    """Messages of an episode in order, each as role and text: the policy's turns and the environment's answers."""
    chat: str = ""
    """Messages of the prompt in tags (`rheostat.models.judges.chats`) if the prompt is a chat, otherwise empty."""
    rubric: Rubric = ()
    """Criteria by which the completion is judged. Empty if there is no rubric."""

    @property
    def is_blank(self) -> bool:
        """Whether the completion consists only of white space. Such completions are not sent to a judge."""
        return not self.completion.strip()


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote of a judge on one completion. The question may be repeated if the answer is invalid."""

    judged: JudgedCompletion
    vote: int

    def build_questions(
        self, reward: JudgeReward, *, seed_parts: tuple[int | str, ...], attempt: int
    ) -> list[Question]:
        """Build the questions for this vote: one for each criterion if there is a rubric, else a single question.

        The sampling seed of an answer is derived from `seed_parts` and the number of the attempt.
        """
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

        If the user configured a template, the delimiter (fence) around the completion also differs for each attempt.
        With default templates, all votes on a completion use the same delimiter, so that their prompts are equal and
        are processed only once.
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
    """Return the messages of each episode, starting with the policy's first turn. A completion that is not an episode
    gets no messages. Of an agent's episode, only the conversation that ends with the last turn has messages."""
    episodes = []
    for turns, messages in zip(rollouts["turns"].to_pylist(), rollouts["messages"].to_pylist(), strict=True):
        texts = [(each["role"], each["content"]) for each in messages or ()]
        wrote = [place for place, (role, _) in enumerate(texts) if role == "assistant"]
        wrote = wrote[-_count_turns_of_messages(turns or ()) :]
        episodes.append(tuple(texts[wrote[0] :]) if turns and wrote else ())
    return episodes


def _count_turns_of_messages(turns: Sequence[Mapping[str, int | None]]) -> int:
    """Return the number of turns whose text is in the messages of an episode: all turns, or those of the conversation
    that ends with the last turn of an agent's episode."""
    parents = {order: turn["parent"] for turn in turns if (order := turn["order"]) is not None}
    if not parents:
        return len(turns)
    count, at = 0, max(parents, default=None)
    while at is not None:
        count, at = count + 1, parents[at]
    return count


def with_canaries(completions: Sequence[JudgedCompletion], canaries: Canaries | None) -> list[JudgedCompletion]:
    """Return the completions to judge, preceded by the canaries: known-bad answers, which are attached to the first
    prompts of the shard."""
    return [*(_canaries(completions, canaries) if canaries and completions else ()), *completions]


def _canaries(completions: Sequence[JudgedCompletion], canaries: Canaries) -> Iterator[JudgedCompletion]:
    """Yield the canaries of a shard: known-bad answers, each attached to a prompt of the shard. Prompts are used in
    rotation."""
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
"""Row of the prompt and number of the sample, which together identify a completion in a verdict shard."""


def tally(
    verdicts: pa.Table, rollouts: pa.Table, *, vote: Literal["mean", "median", "majority"], term: str
) -> list[Judgement]:
    """Combine the votes on each completion into a reward, or into an error if no vote is valid. Of each vote, the last
    attempt counts.

    Raises Damaged if the two tables do not contain the same completions.
    """
    return [_count(votes, vote) for votes in _cast(verdicts, rollouts, term)]


def tally_steps(verdicts: pa.Table, rollouts: pa.Table, *, verdict: StepsVerdict, term: str) -> list[StepValues]:
    """Combine the valid critiques of each completion into values of its steps. Without a valid critique, no step counts
    as wrong.

    Raises Damaged if the two tables do not contain the same completions.
    """
    texts = rollouts["completion"].to_pylist()
    return [
        step_values(text, [judgement.steps for judgement in votes], verdict)
        for text, votes in zip(texts, _cast(verdicts, rollouts, term), strict=True)
    ]


def read_step_values(
    verdicts: pa.Table, rollouts: pa.Table, *, steps: Segmentation, term: str
) -> list[StepValues | Judgement]:
    """Return the scores of the steps of each completion by a process reward model, or the error if it has no scores.
    `steps` is the method that divides completions into steps.

    Raises Damaged if the two tables do not contain the same completions.
    """
    places = zip(verdicts["prompt_row"].to_pylist(), verdicts["sample"].to_pylist(), strict=True)
    values = dict(zip(places, verdicts["step_values"].to_pylist(), strict=True))
    results: list[StepValues | Judgement] = []
    columns = (rollouts[name].to_pylist() for name in ("prompt_row", "sample", "completion"))
    for [judgement], (row, sample, text) in zip(
        _cast(verdicts, rollouts, term), zip(*columns, strict=True), strict=True
    ):
        scores, lengths = values[row, sample], map(len, split_steps(text, steps))
        results.append(judgement if scores is None else StepValues(tuple(lengths), tuple(scores)))
    return results


def step_values(completion: str, critiques: Sequence[Sequence[int] | None], verdict: StepsVerdict) -> StepValues:
    """Combine the critiques of a completion (lists of wrong steps) into a value for each of its steps. Critiques that
    are None are ignored."""
    steps = split_steps(completion, verdict.steps)
    usable = [critique for critique in critiques if critique is not None]
    weights = flag_weights(usable, verdict, num_steps=len(steps))
    return StepValues(tuple(map(len, steps)), tuple(FLAGGED * weight if weight else 0.0 for weight in weights))


def _cast(verdicts: pa.Table, rollouts: pa.Table, term: str) -> list[list[Judgement]]:
    """Return the votes on each completion, in the order of the rollouts. Raises Damaged if the tables do not contain
    the same completions."""
    places = list(zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True))
    votes_by_place = _last_attempts(verdicts)
    if set(votes_by_place) != set(places):
        unpaired = min(set(votes_by_place) ^ set(places))
        raise Damaged(
            f"the verdict shard of reward {term} has verdicts on {format_count(len(votes_by_place), 'completion')}, "
            f"but the rollout shard has {format_count(len(places), 'completion')}. The first that only one of them "
            f"contains is prompt row {unpaired[0]}, sample {unpaired[1]}. Restore both shards from a copy of the run."
        )
    return [votes_by_place[place] for place in places]


def _last_attempts(verdicts: pa.Table) -> dict[VotePlace, list[Judgement]]:
    """Return the judgement of the last attempt of each vote, by completion. Canaries are excluded.

    The rows of `verdicts` must be ordered by vote and attempt.
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
    """Combine the votes on a completion into one judgement. If no vote is valid, the judgement has the last vote's
    error."""
    value = count_votes([judgement.value for judgement in votes], vote)
    return Judgement(value, votes[-1].error if value is None else None)


Votes = Mapping[JudgedCompletion, Sequence[Judgement]]
"""Judgements on each completion or canary: for each vote, the judgement of its last attempt."""


def count_answers(votes: Votes, reward: JudgeReward) -> dict[str, float]:
    """Return metrics of a verdict shard that can be summed over shards: the numbers of votes, invalid votes, canaries
    (known-bad answers), and canaries that the judge accepted.

    `answers` and `invalid` count votes on completions. Repeated attempts are not counted.
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
    """Return whether the judge accepted a canary (known-bad answer), given its votes. None if no vote is valid."""
    if reward.canaries is None or all(vote.value is None for vote in cast):
        return None
    if isinstance(reward.verdict, StepsVerdict):
        return not any(step_values(judged.completion, [vote.steps for vote in cast], reward.verdict).values)
    value = count_votes([vote.value for vote in cast], reward.vote)
    return value is not None and value >= reward.canaries.pass_reward


def _count_steps(votes: Votes, verdict: StepsVerdict) -> dict[str, float]:
    """Return metrics that can be summed over shards: the numbers of completions, completions without a valid critique,
    steps, steps listed as wrong, and ignored step numbers."""
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
