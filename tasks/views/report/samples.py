"""Completions for a page's browser: whole groups of some iterations and evaluations, token by token.

Few shards are read, and what is kept is bounded in bytes: a page of a long run is no larger than of a short one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from infra.config import Settings, read_recorded
from infra.errors import Damaged
from infra.store.bundles import fetch_file
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import read_shard
from models.config.rewards import ScoringConfig
from models.records.columns import Floats, Mask
from models.records.media import Media
from models.records.versions import policy_of
from models.text.token_offsets import open_tokenizer, token_starts
from tasks.run.batch import Batch, pictures_of, without_rollouts
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, evaluation_key, iteration_key, reward_model_role

ITERATIONS, EVALUATIONS = 24, 6
"""Of which completions are shown, spread evenly, the first and the last among them."""
GROUPS: Final = 400
GROUP: Final = 16
"""Completions of a group that are shown: of more, the best and the worst."""
BYTES: Final = 2_200_000
"""Of all completions on a page."""
CHARACTERS: Final = 4000
"""Of a text; the middle of a longer one is left out."""
WORDS: Final = 400
"""Characters of a judge's answer."""
T = TypeVar("T")


class _Segment(TypedDict):
    policy_version: int
    tokens: int


class _Row(TypedDict):
    """A row of a rollout shard, as far as it is shown."""

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
    turns: list[dict[str, int | float | str | None]] | None


class JudgedText(Settings):
    """What a judge wrote of a completion."""

    term: str
    """Reward term that it serves."""
    text: str
    """Its words, shortened."""
    value: float | None = None
    """The reward; none where the answer is invalid."""


class BrowsedCompletion(Settings):
    """A completion and what is known of its tokens; lists of tokens have one entry for each that is shown."""

    sample: int
    """Index inside its group."""
    text: str
    """What the policy wrote, and what it read meanwhile."""
    tokens: int
    """Its length."""
    finish: str
    """Why it ended."""
    reward: float | None = None
    """Total; none if it is missing."""
    terms: dict[str, float | None] = {}
    """By reward term, before its weight."""
    advantage: float | None = None
    """Mean over the tokens that it taught; none where it taught nothing."""
    error: str | None = None
    """Why a score is missing."""
    cut: tuple[int, int] | None = None
    """Where in the text something is left out, and how many characters."""
    pieces: tuple[int, ...] = ()
    """Characters of each token; none where tokens do not spell the text."""
    advantages: tuple[tuple[int, float], ...] = ()
    """Runs of tokens with the same advantage: how many, and which."""
    logprobs: tuple[int, ...] = ()
    """Of the policy that wrote them, in hundredths of a nat."""
    given: tuple[tuple[int, int], ...] = ()
    """Tokens that no policy wrote, from the first to before the last."""
    steps: dict[str, tuple[tuple[int, float], ...]] = {}
    """By reward term that values steps or tokens: where a step begins, and its value."""
    turns: tuple[dict[str, int | float | str | None], ...] = ()
    """Of an episode."""
    judged: tuple[JudgedText, ...] = ()
    """What judges wrote."""
    images: tuple[str, ...] = ()
    """Digests of the pictures that it is."""


class BrowsedGroup(Settings):
    """A prompt and its completions in one iteration or evaluation."""

    batch: str
    """`it-0003` or `eval-0010`."""
    prompt_id: str
    """Stable name of the problem."""
    prompt: str
    """As the policy read it."""
    answer: str | None
    """Reference answer."""
    images: tuple[str, ...] = ()
    """Digests of what the prompt shows."""
    size: int
    """Completions of the whole group."""
    completions: tuple[BrowsedCompletion, ...]
    """Those that are shown, by sample."""


@dataclass(frozen=True, slots=True)
class _Source:
    """An iteration or evaluation whose completions are shown."""

    key: str
    batches: tuple[Batch, ...]
    credit: Manifest | None

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Its prompts, by split and row."""
        return [(batch.plan.split, row) for batch in self.batches for row in batch.plan.rows]


@dataclass(frozen=True, slots=True)
class _Shard:
    """What stages made of some prompts of a shard."""

    rollouts: pa.Table
    scores: pa.Table
    advantages: Mapping[tuple[int, int], Floats]
    judged: Mapping[tuple[int, int], list[JudgedText]]
    drawn: frozenset[str]
    """Digests of the pictures that completions are."""


def browsed_groups(run: Run, *, iterations: Sequence[int], evaluations: Sequence[int]) -> list[BrowsedGroup]:
    """Read groups of some of these sealed iterations and finished evaluations: first of the prompts that come again."""
    kept = sorted(set(iterations) - without_rollouts(run, iterations))
    sources = [_learnt(run, number) for number in spread(kept, ITERATIONS)]
    sources += [
        _Source(evaluation_key(n), (Batch.read(run, evaluation_key(n)),), None)
        for n in spread(evaluations, EVALUATIONS)
    ]
    recurring = Counter(row for source in sources for row in {*source.rows})
    tokenizer, found = _tokenizer(run), list[BrowsedGroup]()
    for source in sources:
        rows = sorted(source.rows, key=lambda row: -recurring[row])[: max(1, GROUPS // len(sources))]
        found += _within(_groups(run, source, [row for _, row in rows], tokenizer), BYTES // len(sources))
    return found


def spread(numbers: Sequence[T], most: int) -> list[T]:
    """Pick so many numbers at most, evenly, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]


def _within(groups: Iterator[BrowsedGroup], most: int) -> Iterator[BrowsedGroup]:
    """Go through groups until they have so many bytes; the first is always shown."""
    held = 0
    for group in groups:
        size = len(group.model_dump_json(exclude_defaults=True).encode())
        if held and held + size > most:
            return
        held += size
        yield group


def _learnt(run: Run, number: int) -> _Source:
    iteration = Iteration(run, number)
    return _Source(iteration_key(number), iteration.batches, iteration.credit)


def _tokenizer(run: Run) -> Tokenizer | None:
    """The policy's own; none where its files were deleted."""
    try:
        weights = policy_of(run.require(StageKey.policy(0))).weights
        return open_tokenizer(fetch_file(run.store, weights, "tokenizer.json"))
    except Damaged:
        return None


def _groups(run: Run, source: _Source, wanted: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[BrowsedGroup]:
    """Read the groups of some prompts, shard by shard."""
    for batch in source.batches:
        for number in batch.shards:
            rows = [row for row in batch.plan.shard_rows(number) if row in wanted]
            made = run.find(batch.plan.rollout_key(number))
            if rows and made is not None:
                yield from _group_rows(_read(run, made, source, rows), source.key, tokenizer)


def _read(run: Run, made: Manifest, source: _Source, rows: Sequence[int]) -> _Shard:
    """Read what is known of some prompts of a rollout shard."""
    key = StageKey.parse(made.key)
    table = read_shard(run.store, made.shards[0])
    chosen = pc.is_in(table["prompt_row"], pa.array(rows, pa.int32()))
    scores = read_shard(run.store, run.require(key.at("scoring")).shards[0])
    return _Shard(
        rollouts=table.select([*_Row.__annotations__]).filter(chosen),
        scores=scores.filter(chosen),
        advantages={} if source.credit is None else _advantages(run, source.credit, rows),
        judged=_judged(run, key, rows),
        drawn=frozenset(Media(run.store, pictures_of(made)).digests),
    )


def _advantages(run: Run, credit: Manifest, rows: Sequence[int]) -> dict[tuple[int, int], Floats]:
    """Advantages of each sample's tokens; turns with prompts of their own come one after the other."""
    found: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    for shard in credit.shards:
        table = read_shard(run.store, shard, ["prompt_row", "sample", "advantages"])
        table = table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))
        for row in table.to_pylist():
            found[row["prompt_row"], row["sample"]].append(np.array(row["advantages"], float))
    return {place: np.concatenate(parts) for place, parts in found.items()}


def _judged(run: Run, key: StageKey, rows: Sequence[int]) -> dict[tuple[int, int], list[JudgedText]]:
    """What judges wrote: of each vote the last attempt."""
    found: dict[tuple[int, int], list[JudgedText]] = defaultdict(list)
    for term in read_recorded(ScoringConfig, run.record.config["scoring"]).model_rewards:
        made = run.find(key.at(reward_model_role(term)))
        if made is None:
            continue
        table = read_shard(run.store, made.shards[0])
        table = table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))
        last = {(row["prompt_row"], row["sample"], row["vote"]): row for row in table.to_pylist()}
        for (prompt_row, sample, _), row in last.items():
            if words := row["text"] or row["error"]:
                found[prompt_row, sample].append(JudgedText(term=term, text=words[:WORDS], value=row["value"]))
    return found


def _group_rows(shard: _Shard, key: str, tokenizer: Tokenizer | None) -> Iterator[BrowsedGroup]:
    """Lay the rows of a shard out by prompt."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(shard.rollouts["prompt_row"].to_pylist()):
        groups[row].append(place)
    rewards = shard.scores["reward"].to_pylist()
    for places in groups.values():
        rows: list[_Row] = shard.rollouts.take(_shown(places, rewards)).to_pylist()
        scores = shard.scores.take(_shown(places, rewards)).to_pylist()
        first = rows[0]
        yield BrowsedGroup(
            batch=key,
            prompt_id=first["prompt_id"],
            prompt=_cut(first["prompt"])[0],
            answer=first["answer"],
            images=tuple(digest for digest in first["images"] if digest not in shard.drawn),
            size=len(places),
            completions=tuple(
                _completion(row, score, shard, tokenizer) for row, score in zip(rows, scores, strict=True)
            ),
        )


def _shown(places: Sequence[int], rewards: Sequence[float | None]) -> list[int]:
    """Of a large group the best and the worst, in order."""
    if len(places) <= GROUP:
        return list(places)
    ranked = sorted(places, key=lambda place: float("-inf") if rewards[place] is None else rewards[place] or 0.0)
    return sorted([*ranked[: GROUP // 2], *ranked[-GROUP // 2 :]])


def _completion(
    row: _Row, score: Mapping[str, object], shard: _Shard, tokenizer: Tokenizer | None
) -> BrowsedCompletion:
    tokens, text, place = row["completion_tokens"], row["completion"], (row["prompt_row"], row["sample"])
    starts = None if tokenizer is None else token_starts(tokenizer, tokens, text)
    shown, cut, kept = _cut(text, starts)
    written = _written(row["segments"])
    advantages = _spread_out(shard.advantages.get(place), written)
    terms = {name.removeprefix("reward_"): value for name, value in score.items() if name.startswith("reward_")}
    told = {
        "sample": row["sample"], "text": shown, "tokens": len(tokens), "finish": row["finish_reason"],
        "reward": score["reward"], "terms": terms, "error": score["error"], "cut": cut,
        "turns": row["turns"] or (), "judged": shard.judged.get(place, ()),
        "images": [digest for digest in row["images"] if digest in shard.drawn],
    }  # fmt: skip
    if advantages is not None and written.any():
        told["advantage"] = float(advantages[written].mean())
    if starts is not None:
        told |= _of_tokens(row, score, starts=[*starts, len(text)], kept=kept, advantages=advantages, written=written)
    return BrowsedCompletion.model_validate(told)


def _of_tokens(
    row: _Row,
    score: Mapping[str, object],
    *,
    starts: Sequence[int],
    kept: Sequence[int],
    advantages: Floats | None,
    written: Mask,
) -> dict[str, object]:
    """What is known of each token that is shown."""
    places = {token: place for place, token in enumerate(kept)}
    logprobs = np.array(row["logprobs"], float)[list(kept)]
    found: dict[str, object] = {
        "pieces": [starts[token + 1] - starts[token] for token in kept],
        "logprobs": np.nan_to_num(np.round(100 * logprobs), neginf=-9999).astype(int).tolist(),
        "given": [(begin, end) for begin, end, is_written in _runs(written[list(kept)]) if not is_written],
        "steps": {
            term: [(places[first], value) for first, value in steps if first in places] for term, steps in _steps(score)
        },
    }
    if advantages is not None:
        runs = _runs(np.round(advantages[list(kept)], 4))
        found["advantages"] = [(end - begin, value) for begin, end, value in runs]
    return found


def _steps(score: Mapping[str, object]) -> Iterator[tuple[str, Iterator[tuple[int, float]]]]:
    """By reward term that values steps or tokens, where each begins and what it is worth."""
    for name, begins in score.items():
        values = score.get(f"values_{name.removeprefix('spans_')}")
        if isinstance(begins, list) and isinstance(values, list):
            yield name.removeprefix("spans_"), zip(begins, values, strict=True)


def _runs(values: Floats | Mask) -> list[tuple[int, int, float]]:
    """Cut into stretches of the same value."""
    if not len(values):
        return []
    ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(begin, end, values[begin].item()) for begin, end in zip([0, *ends], ends, strict=False)]


def _written(segments: Sequence[_Segment]) -> Mask:
    """Of each token whether a policy wrote it."""
    return np.repeat([each["policy_version"] >= 0 for each in segments], [each["tokens"] for each in segments]).astype(
        bool
    )


def _spread_out(advantages: Floats | None, written: Mask) -> Floats | None:
    """Advantages of all tokens; samples of turns with prompts of their own have those that were written alone."""
    if advantages is None or len(advantages) == len(written):
        return advantages
    if len(advantages) != written.sum():
        return None
    found = np.zeros(len(written))
    found[written] = advantages
    return found


def _cut(text: str, starts: Sequence[int] | None = None) -> tuple[str, tuple[int, int] | None, Sequence[int]]:
    """Leave out the middle of a long text, where tokens begin; also say where, and which tokens are left."""
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
