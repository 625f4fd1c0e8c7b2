"""Completions for the completion browser of a page: whole groups of some iterations and evaluations, token by token.

Only a few shards are read and the size of the result is bounded, so the page of a long run is no larger than the page
of a short run.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import fetch_bundle_file
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.columns import Floats, Integers, Mask
from rheostat.models.records.media import Media
from rheostat.models.records.model_input import TURN_PROMPT
from rheostat.models.records.schemas import FEEDBACK_COLUMN
from rheostat.models.records.versions import policy_of
from rheostat.models.text.token_offsets import find_token_starts, open_tokenizer
from rheostat.tasks.run.batch import Batch, iterations_without_rollouts, picture_shards_of
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key, reward_model_role
from rheostat.tasks.views.turns import arrange_turns

ITERATIONS, EVALUATIONS = 24, 6
"""Maximum numbers of iterations and evaluations with completions on a page. They are spread evenly, and the first and
the last are always among them."""
GROUPS: Final = 400
GROUP: Final = 16
"""Maximum number of completions shown per group. Of larger groups the best and the worst are shown."""
BYTES: Final = 2_200_000
"""Maximum size of all completions on a page, in bytes."""
CHARACTERS: Final = 4000
"""Maximum number of characters per text. The middle of a longer text is left out."""
WORDS: Final = 400
"""Maximum number of characters shown of a judge's answer."""
T = TypeVar("T")
_Fact = bool | int | float | str | None


class _Segment(TypedDict):
    policy_version: int
    tokens: int


class _Row(TypedDict):
    """Row of a rollout shard, with the columns that a report shows."""

    prompt_row: int
    sample: int
    prompt_id: str
    prompt: str
    completion: str
    answer: str | None
    completion_tokens: list[int]
    images: list[str]
    logprobs: list[float]
    finish_reason: str
    segments: list[_Segment]
    turns: list[dict[str, Any]] | None


class JudgedText(Settings):
    """Answer of a judge about a completion."""

    term: str
    """Reward term that the judge scores."""
    text: str
    """Answer of the judge, shortened."""
    value: float | None = None
    """Reward from this answer, or None if the answer is invalid."""


class BrowsedCompletion(Settings):
    """Completion in a report. Lists with data of tokens have one entry for each token that is shown."""

    sample: int
    """Index of the completion in its group."""
    text: str
    """Text of the completion, including responses of an environment between its turns."""
    tokens: int
    """Number of tokens."""
    finish: str
    """Reason why generation ended."""
    reward: float | None = None
    """Total reward, or None if it is missing."""
    terms: dict[str, float | None] = {}
    """Value of each reward term before its weight."""
    advantage: float | None = None
    """Mean advantage of the tokens that the policy generated, or None if the update did not use the completion."""
    error: str | None = None
    """Reason why a score is missing, or None."""
    feedback: str | None = None
    """Beginning of the feedback of the rewards on the completion, or None."""
    cut: tuple[int, int] | None = None
    """Position in the text at which characters are left out, and how many are left out. None if the text is whole."""
    pieces: tuple[int, ...] = ()
    """Number of characters of each token. Empty if the tokens cannot be aligned with the text."""
    advantages: tuple[tuple[int, float], ...] = ()
    """Advantages in run-length encoding: pairs of a number of tokens and their common advantage."""
    logprobs: tuple[int, ...] = ()
    """Log-probs under the policy that generated the tokens, in hundredths of a nat."""
    given: tuple[tuple[int, int], ...] = ()
    """Ranges of tokens that no policy generated, such as responses of tools, as first token and end (exclusive)."""
    steps: dict[str, tuple[tuple[int, float], ...]] = {}
    """First token and value of each scored step, by reward term. Only terms that score steps or tokens are listed."""
    turns: tuple[dict[str, _Fact], ...] = ()
    """Turns of the episode in the order of their tree, with their `depth` in it. Empty without an environment."""
    judged: tuple[JudgedText, ...] = ()
    """Answers of judges about the completion."""
    images: tuple[str, ...] = ()
    """Digests of the generated images, if the completion is an image."""


class BrowsedGroup(Settings):
    """Prompt in a report, with its completions in one iteration or evaluation."""

    batch: str
    """Key of the iteration or evaluation, for example `it-0003` or `eval-0010`."""
    prompt_id: str
    """Identifier of the problem, which is the same in all iterations and runs."""
    prompt: str
    """Prompt as the policy received it."""
    answer: str | None
    """Reference answer."""
    images: tuple[str, ...] = ()
    """Digests of the images in the prompt."""
    size: int
    """Number of completions in the whole group."""
    completions: tuple[BrowsedCompletion, ...]
    """Completions that are shown, in the order of their sample numbers."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Iteration or evaluation to read completions from. An evaluation has no training samples (`credit`)."""

    key: str
    batches: tuple[Batch, ...]
    credit: Manifest | None

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Split and row number of each prompt."""
        return [(batch.plan.split, row) for batch in self.batches for row in batch.plan.rows]


@dataclass(frozen=True, slots=True)
class _Shard:
    """Rollouts of one shard with scores, and with advantages and judges' answers by prompt row and sample number."""

    rollouts: pa.Table
    scores: pa.Table
    advantages: Mapping[tuple[int, int], Floats]
    judged: Mapping[tuple[int, int], list[JudgedText]]
    drawn: frozenset[str]
    """Digests of the images that the policy generated."""


def browsed_groups(run: Run, *, iterations: Sequence[int], evaluations: Sequence[int]) -> list[BrowsedGroup]:
    """Read completions for a report from some of the given iterations and evaluations.

    Prompts that recur in several of them are preferred, so that a reader can compare their completions over time.
    """
    kept = sorted(set(iterations) - iterations_without_rollouts(run, iterations))
    sources = [_iteration_source(run, number) for number in spread(kept, ITERATIONS)]
    sources += [
        _Source(evaluation_key(n), (Batch.read(run, evaluation_key(n)),), None)
        for n in spread(evaluations, EVALUATIONS)
    ]
    recurring = Counter(row for source in sources for row in {*source.rows})
    tokenizer, groups = _open_tokenizer(run), list[BrowsedGroup]()
    for source in sources:
        rows = sorted(source.rows, key=lambda row: -recurring[row])[: max(1, GROUPS // len(sources))]
        groups += _limit_bytes(_read_groups(run, source, [row for _, row in rows], tokenizer), BYTES // len(sources))
    return groups


def spread(numbers: Sequence[T], limit: int) -> list[T]:
    """Choose at most `limit` of the numbers, spread evenly. The first and the last are always included."""
    if len(numbers) <= limit:
        return list(numbers)
    return [numbers[round(place * (len(numbers) - 1) / (limit - 1))] for place in range(limit)]


def _limit_bytes(groups: Iterator[BrowsedGroup], max_bytes: int) -> Iterator[BrowsedGroup]:
    """Yield groups until their total size reaches `max_bytes` bytes. The first group is always yielded."""
    num_bytes = 0
    for group in groups:
        size = len(group.model_dump_json(exclude_defaults=True).encode())
        if num_bytes and num_bytes + size > max_bytes:
            return
        num_bytes += size
        yield group


def _iteration_source(run: Run, number: int) -> _Source:
    iteration = Iteration(run, number)
    return _Source(iteration_key(number), iteration.batches, iteration.credit)


def _open_tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer of the policy, or None if its files were deleted."""
    try:
        weights = policy_of(run.require(StageKey.policy(0))).weights
        return open_tokenizer(fetch_bundle_file(run.store, weights, "tokenizer.json"))
    except Damaged:
        return None


def _read_groups(run: Run, source: _Source, kept: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[BrowsedGroup]:
    """Yield the completions for the prompts in `kept`, one group per prompt, shard by shard."""
    for batch in source.batches:
        for number in batch.shards:
            rows = [row for row in batch.plan.shard_rows(number) if row in kept]
            manifest = run.find(batch.plan.rollout_key(number))
            if rows and manifest is not None:
                yield from _group_rows(_read_shard_data(run, manifest, source, rows), source.key, tokenizer)


def _read_shard_data(run: Run, manifest: Manifest, source: _Source, rows: Sequence[int]) -> _Shard:
    """Read rollouts, scores, advantages and judges' answers for some prompts of a shard."""
    key = StageKey.parse(manifest.key)
    table = read_shard(run.store, manifest.shards[0])
    chosen = pc.is_in(table["prompt_row"], pa.array(rows, pa.int32()))
    scores = read_shard(run.store, run.require(key.with_stage("scoring")).shards[0])
    return _Shard(
        rollouts=table.select([*_Row.__annotations__]).filter(chosen),
        scores=scores.filter(chosen),
        advantages={} if source.credit is None else _read_advantages(run, source.credit, rows),
        judged=_read_answers(run, key, rows),
        drawn=frozenset(Media(run.store, picture_shards_of(manifest)).digests),
    )


def _read_advantages(run: Run, credit: Manifest, rows: Sequence[int]) -> dict[tuple[int, int], Floats]:
    """Return the advantages of each completion's tokens, by prompt row and sample number. If every turn of an episode
    has a separate prompt, or if the episode has branches, they are concatenated in order."""
    advantages: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    for shard in credit.shards:
        table = read_shard(run.store, shard, ["prompt_row", "sample", "advantages"])
        table = table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))
        for row in table.to_pylist():
            advantages[row["prompt_row"], row["sample"]].append(np.array(row["advantages"], float))
    return {place: np.concatenate(parts) for place, parts in advantages.items()}


def _read_answers(run: Run, key: StageKey, rows: Sequence[int]) -> dict[tuple[int, int], list[JudgedText]]:
    """Return judges' answers by prompt row and sample number. If a vote took several attempts, only the last one is
    included."""
    answers: dict[tuple[int, int], list[JudgedText]] = defaultdict(list)
    for term in read_recorded(ScoringConfig, run.record.config["scoring"]).model_rewards:
        manifest = run.find(key.with_stage(reward_model_role(term)))
        if manifest is None:
            continue
        table = read_shard(run.store, manifest.shards[0])
        table = table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))
        last = {(row["prompt_row"], row["sample"], row["vote"]): row for row in table.to_pylist()}
        for (prompt_row, sample, _), row in last.items():
            if words := row["text"] or row["error"]:
                answers[prompt_row, sample].append(JudgedText(term=term, text=words[:WORDS], value=row["value"]))
    return answers


def _group_rows(shard: _Shard, key: str, tokenizer: Tokenizer | None) -> Iterator[BrowsedGroup]:
    """Yield one group of completions for each prompt of a shard."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(shard.rollouts["prompt_row"].to_pylist()):
        groups[row].append(place)
    rewards = shard.scores["reward"].to_pylist()
    for places in groups.values():
        rows: list[_Row] = shard.rollouts.take(_choose_places(places, rewards)).to_pylist()
        scores = shard.scores.take(_choose_places(places, rewards)).to_pylist()
        first = rows[0]
        yield BrowsedGroup(
            batch=key,
            prompt_id=first["prompt_id"],
            prompt=_shorten(first["prompt"])[0],
            answer=first["answer"],
            images=tuple(digest for digest in first["images"] if digest not in shard.drawn),
            size=len(places),
            completions=tuple(
                _build_completion(row, score, shard, tokenizer) for row, score in zip(rows, scores, strict=True)
            ),
        )


def _choose_places(places: Sequence[int], rewards: Sequence[float | None]) -> list[int]:
    """Return the positions of the completions to show, in order. For a large group these are the best and the worst."""
    if len(places) <= GROUP:
        return list(places)
    ranked = sorted(places, key=lambda place: float("-inf") if rewards[place] is None else rewards[place] or 0.0)
    return sorted([*ranked[: GROUP // 2], *ranked[-GROUP // 2 :]])


def _build_completion(
    row: _Row, score: Mapping[str, object], shard: _Shard, tokenizer: Tokenizer | None
) -> BrowsedCompletion:
    tokens, text, place = row["completion_tokens"], row["completion"], (row["prompt_row"], row["sample"])
    starts = None if tokenizer is None else find_token_starts(tokenizer, tokens, text)
    shortened, cut, kept = _shorten(text, starts)
    versions = _versions_of_tokens(row["segments"])
    mask = versions >= 0
    advantages = _spread_advantages(shard.advantages.get(place), versions != TURN_PROMPT)
    terms = {name.removeprefix("reward_"): value for name, value in score.items() if name.startswith("reward_")}
    fields = {
        "sample": row["sample"], "text": shortened, "tokens": len(tokens), "finish": row["finish_reason"],
        "reward": score["reward"], "terms": terms, "error": score["error"], "cut": cut,
        "feedback": str(score.get(FEEDBACK_COLUMN) or "")[:WORDS] or None,
        "turns": _arrange(row["turns"] or ()), "judged": shard.judged.get(place, ()),
        "images": [digest for digest in row["images"] if digest in shard.drawn],
    }  # fmt: skip
    if advantages is not None and mask.any():
        fields["advantage"] = float(advantages[mask].mean())
    if starts is not None:
        fields |= _token_fields(row, score, starts=[*starts, len(text)], kept=kept, advantages=advantages, mask=mask)
    return BrowsedCompletion.model_validate(fields)


def _arrange(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    links = [(turn["order"], turn["parent"]) for turn in turns]
    return [turns[position] | {"depth": depth} for position, depth in arrange_turns(links)]


def _token_fields(
    row: _Row,
    score: Mapping[str, object],
    *,
    starts: Sequence[int],
    kept: Sequence[int],
    advantages: Floats | None,
    mask: Mask,
) -> dict[str, object]:
    """Return the fields of `BrowsedCompletion` that describe single tokens."""
    places = {token: place for place, token in enumerate(kept)}
    logprobs = np.array(row["logprobs"], float)[list(kept)]
    fields: dict[str, object] = {
        "pieces": [starts[token + 1] - starts[token] for token in kept],
        "logprobs": np.nan_to_num(np.round(100 * logprobs), neginf=-9999).astype(int).tolist(),
        "given": [(begin, end) for begin, end, is_own in _equal_runs(mask[list(kept)]) if not is_own],
        "steps": {
            term: [(places[first], value) for first, value in steps if first in places] for term, steps in _steps(score)
        },
    }
    if advantages is not None:
        runs = _equal_runs(np.round(advantages[list(kept)], 4))
        fields["advantages"] = [(end - begin, value) for begin, end, value in runs]
    return fields


def _steps(score: Mapping[str, object]) -> Iterator[tuple[str, Iterator[tuple[int, float]]]]:
    """Yield each reward term that scores steps or tokens, with (first token, value) of each step."""
    for name, begins in score.items():
        values = score.get(f"values_{name.removeprefix('spans_')}")
        if isinstance(begins, list) and isinstance(values, list):
            yield name.removeprefix("spans_"), zip(begins, values, strict=True)


def _equal_runs(values: Floats | Mask) -> list[tuple[int, int, float]]:
    """Return the ranges of equal consecutive values as (begin, end, value). The end is exclusive."""
    if not len(values):
        return []
    ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(begin, end, values[begin].item()) for begin, end in zip([0, *ends], ends, strict=False)]


def _versions_of_tokens(segments: Sequence[_Segment]) -> Integers:
    """Return the policy version of each token, which is negative for tokens that no policy generated."""
    versions = np.array([each["policy_version"] for each in segments], np.int64)
    return np.repeat(versions, np.array([each["tokens"] for each in segments], np.int64))


def _spread_advantages(advantages: Floats | None, mask: Mask) -> Floats | None:
    """Return one advantage per token of the completion, or None if the lengths do not match.

    `mask` selects the tokens that have advantages. Other tokens, which are prompts of turns and branches, get 0.
    """
    if advantages is None or len(advantages) != mask.sum():
        return None
    spread_advantages = np.zeros(len(mask))
    spread_advantages[mask] = advantages
    return spread_advantages


def _shorten(text: str, starts: Sequence[int] | None = None) -> tuple[str, tuple[int, int] | None, Sequence[int]]:
    """Cut the middle out of a long text, at token boundaries if `starts` is given.

    Return the shortened text, the cut as position and number of characters (None if nothing is cut), and the indices of
    the tokens that are left.
    """
    if len(text) <= CHARACTERS:
        return text, None, range(len(starts or ()))
    begin, end = 2 * CHARACTERS // 3, len(text) - CHARACTERS // 3
    kept: list[int] = []
    if starts is not None:
        bounds = [*starts, len(text)]
        first = next(token for token, at in enumerate(bounds) if at >= begin)
        last = next(token for token, at in enumerate(bounds) if at >= max(end, bounds[first]))
        begin, end, kept = bounds[first], bounds[last], [*range(first), *range(last, len(starts))]
    return text[:begin] + text[end:], (begin, end - begin), kept
