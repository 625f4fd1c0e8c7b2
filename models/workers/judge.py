"""Worker that queries a judge (a model that rates completions) and writes one shard of verdicts per rollout shard."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.config.judges import EndpointJudge, JudgeReward
from rheostat.models.engines.protocol import StepSums
from rheostat.models.judges.chats import mark_prompt
from rheostat.models.judges.rubrics import combine_answers, combine_judgements
from rheostat.models.judges.verdicts import Answer, Judge, Judgement, lowest_reward, read_verdict
from rheostat.models.judges.votes import Ballot, JudgedCompletion, count_answers, read_episodes, with_canaries
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import image_digests
from rheostat.models.records.schemas import VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome, order_statistics
from rheostat.models.records.work import JudgeWork
from rheostat.models.text.steps import split_steps
from rheostat.models.workers.prompt_chats import Chat, read_chats, read_rubrics

if TYPE_CHECKING:
    from rheostat.models.judges.local import LocalJudge

logger = logging.getLogger(__name__)

EPISODE_COLUMNS = ("images", "turns", "messages")
ROLLOUT_COLUMNS = ("prompt_row", "sample", "prompt", "completion", "answer")
KEPT_CHARACTERS = 10_000
"""Maximum number of characters of a judge's answer that are stored. The rest of a longer answer is dropped."""


@dataclass(frozen=True, slots=True)
class _CastVote:
    """One answer of the judge to one ballot, which is the request for one vote on one completion."""

    attempt: int
    answer: Answer
    judgement: Judgement


@dataclass(slots=True)
class _Votes:
    """Answers to all ballots, including repeated attempts. Only the last answer to a ballot counts."""

    cast: dict[Ballot, list[_CastVote]] = field(default_factory=dict)

    def last(self, judged: JudgedCompletion, votes: int) -> list[Judgement]:
        return [self.cast[Ballot(judged, vote)][-1].judgement for vote in range(votes)]


class JudgeWorker:
    """Worker that queries one judge, a model that rates completions. Weights are verified before they are used.

    If the worker runs the judge's model itself, the same work gives the same shard, byte for byte, in any process with
    the same number of threads. With vLLM the shards may differ if two answers are equally likely up to rounding.
    """

    def __init__(self, store_uri: str, run: str, term: str, reward: JudgeReward, threads: int) -> None:
        self._store = run_store(store_uri, run)
        self._term = term
        self._reward = reward
        self._local: LocalJudge | None = None
        if reward.endpoint is not None:
            self._judge = _build_endpoint_judge(reward.endpoint, reward)
        else:
            self._judge = self._local = _build_local_judge(reward, threads)

    def progress(self) -> int:
        """Return the number of forward passes, requests and model loads so far. If the number stops growing, the worker
        is stuck."""
        return self._judge.progress

    def take(self, policy: ModelVersion) -> str:
        """Load version `policy` of the judge's model unless it is already loaded, and return the digest of the loaded
        model. Raises BadInput if the judge is behind an endpoint."""
        if self._local is None:
            raise BadInput(
                f"judge {self._term}: the model of the judge is behind an endpoint, so it cannot be loaded in this "
                "process"
            )
        if self._local.loaded_digest() != policy.digest:
            self._local.load(fetch_bundle(self._store, policy.weights), policy)
            logger.info("judge %s: loaded %s", self._term, policy.digest)
        return policy.digest

    def sleep(self) -> None:
        """Release the memory of the judge's model, so that another worker can use the GPU. The next work unit loads the
        model again."""
        if self._local is not None:
            self._local.sleep()

    def close(self) -> None:
        """Close the engine that runs the judge's model, if this worker runs one."""
        if self._local is not None:
            self._local.close()

    def judge(self, work: JudgeWork) -> Outcome:
        """Rate every completion of a rollout shard with the judge, and write the verdicts as one shard. The first rows
        are the verdicts on canaries, which are known-bad answers that test the judge. Raises BadInput if the judge's
        model runs in this worker and the work unit does not name the model."""
        clock = time.perf_counter
        started = clock()
        if self._local is not None:
            if work.model is None:
                raise BadInput(f"judge {self._term}: the work unit does not name the model of the judge")
            self.take(work.model)
        if self._reward.images == "prompt":
            self._judge.show(Media(self._store, work.media))
        loaded, before = clock(), self._steps()
        rollouts = read_shard(self._store, work.rollouts, (*ROLLOUT_COLUMNS, *EPISODE_COLUMNS))
        takes_messages = work.prompts is not None and self._reward.chat_prompt == "messages"
        chats = read_chats(self._store, work.prompts) if work.prompts is not None and takes_messages else None
        completions = self._add_rubrics(_read_completions(rollouts, chats), work)
        everything = with_canaries(completions, self._reward.canaries)
        votes = self._collect_votes([judged for judged in everything if not judged.is_blank], work)
        judged = clock()
        table = _build_table(everything, votes, self._reward)
        metadata = {
            "iteration": str(work.iteration),
            "rollouts": work.rollouts.digest,
            "term": self._term,
            "producer": "endpoint" if self._local is None else self._local.producer(),
        }
        ref = write_shard(self._store, table, kind="verdicts", metadata=metadata)
        answers = [cast.answer for casts in votes.cast.values() for cast in casts]
        return Outcome(
            shards=(ref,),
            metrics=_compute_metrics(everything, votes, self._reward),
            detail={"lengths": order_statistics([answer.tokens for answer in answers])},
            timings={"load": loaded - started, "generate": judged - loaded, "write": clock() - judged}
            | self._steps().since(before)
            | self._count_prompt_tokens(answers),
        )

    def _add_rubrics(self, completions: list[JudgedCompletion], work: JudgeWork) -> list[JudgedCompletion]:
        """Return the completions together with the rubrics (grading criteria) of their problems, if the judge uses
        rubrics."""
        if not self._reward.uses_rubric:
            return completions
        if work.prompts is None:
            raise BadInput(f"judge {self._term}: the work unit names no prompts, from which the rubrics are read")
        rubrics = read_rubrics(self._store, work.prompts)
        return [replace(each, rubric=rubrics[each.prompt_row]) for each in completions]

    def _count_prompt_tokens(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the number of prompt tokens that the judge's endpoint reports, keyed by `read_tokens`, or an empty
        dict for a local judge. It is reported with the timings, because it may vary between equal requests."""
        return {"read_tokens": float(sum(each.tokens_read for each in answers))} if self._local is None else {}

    def _steps(self) -> StepSums:
        return StepSums() if self._local is None else self._local.step_sums()

    def _collect_votes(self, completions: Sequence[JudgedCompletion], work: JudgeWork) -> _Votes:
        """Request all votes on the completions in one batch. Then repeat the requests that got invalid answers, up to
        `retries` times."""
        seed_parts = (self._term, work.seed, work.iteration)
        num_steps = {judged: _num_steps(judged, self._reward) for judged in completions}
        votes = _Votes()
        open_ballots = [Ballot(judged, vote) for judged in completions for vote in range(self._reward.votes)]
        for attempt in range(self._reward.retries + 1):
            if not open_ballots:
                break
            questions = [
                ballot.build_questions(self._reward, seed_parts=seed_parts, attempt=attempt) for ballot in open_ballots
            ]
            answers = iter(self._judge.answer([question for each in questions for question in each]))
            for ballot, own in zip(open_ballots, questions, strict=True):
                cast = self._read_answers(ballot.judged, [next(answers) for _ in own], num_steps[ballot.judged])
                votes.cast.setdefault(ballot, []).append(_CastVote(attempt, *cast))
            open_ballots = [ballot for ballot in open_ballots if votes.cast[ballot][-1].judgement.value is None]
        return votes

    def _read_answers(
        self, judged: JudgedCompletion, answers: Sequence[Answer], num_steps: int
    ) -> tuple[Answer, Judgement]:
        """Return the judge's answer and the judgement for one vote on a completion. If the judge uses a rubric, the
        answers to all of its criteria are combined."""
        judgements = [read_verdict(each, self._reward.answer_verdict, num_steps=num_steps) for each in answers]
        if not judged.rubric:
            return answers[0], judgements[0]
        combined = combine_answers(judged.rubric, answers, judgements)
        return combined, combine_judgements(judged.rubric, judgements)


def _num_steps(judged: JudgedCompletion, reward: JudgeReward) -> int:
    verdict = reward.steps_verdict
    return 0 if verdict is None else len(split_steps(judged.completion, verdict.steps))


def _build_local_judge(reward: JudgeReward, threads: int) -> "LocalJudge":
    from rheostat.models.judges.local import LocalJudge  # imports torch, which a worker with an endpoint need not load

    assert reward.engine is not None, "a model that is not behind an endpoint has an engine"
    return LocalJudge(
        reward.engine,
        reward.sampling,
        verdict=reward.answer_verdict,
        chat=reward.model.uses_chat_template,
        threads=threads,
        rules=reward.model.text_rules,
    )


def _build_endpoint_judge(model: EndpointJudge, reward: JudgeReward) -> Judge:
    from rheostat.models.judges import endpoint

    return endpoint.ChatJudge(model, sampling=reward.sampling, verdict=reward.answer_verdict)


def _read_completions(rollouts: pa.Table, chats: Sequence[Chat] | None) -> list[JudgedCompletion]:
    """Read the completions to judge from a rollout table. `chats` contains the chat messages of each prompt by prompt
    row, or is None if the judge does not receive the messages."""
    columns = (rollouts[name].to_pylist() for name in (*ROLLOUT_COLUMNS, "prompt_row"))
    rows = zip(*columns, image_digests(rollouts), read_episodes(rollouts), strict=True)
    completions = [JudgedCompletion(*row) for row in rows]
    if chats is None:
        return completions
    marked = {row: mark_prompt(*chats[row]) for row in {each.prompt_row for each in completions} if chats[row][0]}
    return [replace(each, chat=marked.get(each.prompt_row, "")) for each in completions]


def _build_table(everything: Sequence[JudgedCompletion], votes: _Votes, reward: JudgeReward) -> pa.Table:
    ordered = sorted(everything, key=lambda judged: (judged.prompt_row, judged.sample))
    rows = [row for judged in ordered for row in _iter_rows(judged, votes, reward)]
    return pa.Table.from_pylist(rows, schema=VERDICT_SCHEMA)


def _iter_rows(
    judged: JudgedCompletion, votes: _Votes, reward: JudgeReward
) -> Iterator[dict[str, int | float | str | list[int] | None]]:
    place = {"prompt_row": judged.prompt_row, "sample": judged.sample}
    if judged.is_blank:
        blank = None if reward.steps_verdict is None else [0]  # flags the only step of a blank completion as wrong
        lowest = 0.0 if reward.uses_rubric else lowest_reward(reward.answer_verdict)
        verdict = {
            "text": None,
            "value": lowest,
            "steps": blank,
            "error": None,
            "tokens": 0,
        }
        yield {**place, "vote": 0, "attempt": 0, **verdict}
        return
    for vote in range(reward.votes):
        for cast in votes.cast[Ballot(judged, vote)]:
            text, judgement = cast.answer.text, cast.judgement
            kept = None if judged.rubric else KEPT_CHARACTERS  # texts about rubrics are limited by their parts
            yield {
                **place,
                "vote": vote,
                "attempt": cast.attempt,
                "text": None if text is None else text[:kept].encode("utf-8", "replace").decode(),
                "value": judgement.value,
                "steps": None if judgement.steps is None else [*judgement.steps],
                "error": judgement.error,
                "tokens": cast.answer.tokens,
            }


def _compute_metrics(everything: Sequence[JudgedCompletion], votes: _Votes, reward: JudgeReward) -> dict[str, float]:
    """Return the number of requests to the judge, of their tokens, and of valid and invalid votes."""
    spoken = [judged for judged in everything if not judged.is_blank]
    answer_lengths = [cast.answer.tokens for casts in votes.cast.values() for cast in casts]
    return {
        "sequences": float(len(answer_lengths)),
        "tokens": float(sum(answer_lengths)),
        "empty": float(len(everything) - len(spoken)),
        **count_answers({judged: votes.last(judged, reward.votes) for judged in spoken}, reward),
    }
