"""Stored long runs without any computation, for reports of long runs and of hostile texts."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rheostat.infra.costs import Cost
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.manifests import Manifest, Provenance
from rheostat.infra.store.runs import Run, create_run
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.images import digest_of, media_tables
from rheostat.models.records.media import MEDIA
from rheostat.models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_SCHEMA, score_schema
from rheostat.tasks.config.run import override_config
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.keys import PROMPTS, StageKey, evaluation_key, iteration_key
from tests.support.demos import ARITHMETIC

PROBLEMS = 64
TABLES = 32
"""Number of different rollouts, which iterations repeat."""
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def write_long_run(
    store: Path,
    *,
    name: str = "long",
    iterations: int,
    group: int = 8,
    texts: Sequence[str] = ("one\n", "two\n"),
    pictures: Sequence[bytes] = (),
) -> Run:
    """Write a run of 64 problems. Its completions are texts, each byte of which is a token, or also pictures."""
    rewards = [{"kind": "regex", "name": "right", "pattern": "1"}, {"kind": "regex", "name": "short", "pattern": "2"}]
    scoring, rollout = {"rewards": rewards}, {"prompts": PROBLEMS, "group_size": group}
    asked = {"name": name, "data": ARITHMETIC, "scoring": scoring, "rollout": rollout}
    config = override_config(asked, [], source=name)
    run, spelt = create_run(str(store), name, config.identity()), _byte_tokenizer()
    _write_policy(run, spelt)
    _write_prompts(run)
    parts = [_shards(run, spelt, table, group, texts, pictures) for table in range(min(TABLES, iterations))]
    for number in range(1, iterations + 1):
        _write_iteration(run, number, parts[number % len(parts)], group)
    for number in dict.fromkeys([*range(0, iterations, max(1, iterations // 20)), iterations]):
        _write_evaluation(run, number, parts[number % len(parts)], group)
    return run


def _put(run: Run, manifest: Manifest) -> None:
    """Write a manifest as a store does, without fsync, because there are thousands."""
    path = Path(run.store.locate("run.json")).parent / f"manifests/{manifest.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.model_copy(update={"run": run.record.fingerprint}).encode())


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_policy(run: Run, tokenizer: Tokenizer) -> None:
    with run.store.scratch() as scratch:
        (scratch / "policy").mkdir()
        tokenizer.save(str(scratch / "policy" / "tokenizer.json"))
        weights = publish_bundle(run.store, scratch / "policy", prefix="policies")
    _put(run, Manifest(key=StageKey.policy(0), bundles={"weights": weights}, detail={"version": 0}))


def _write_prompts(run: Run) -> None:
    for split in PROMPTS:
        rows = [
            {"prompt_id": f"{split}-{row}", "text": f"{split} problem {row}?", "tokens": [1], "images": [],
             "answer": "1", "columns": "{}", "messages": None}
            for row in range(PROBLEMS)
        ]  # fmt: skip
        table = pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)
        _put(run, Manifest(key=PROMPTS[split], shards=(write_shard(run.store, table, kind="prompts", metadata={}),)))


def _shards(
    run: Run, tokenizer: Tokenizer, seed: int, group: int, texts: Sequence[str], pictures: Sequence[bytes]
) -> dict[str, ShardRef]:
    """Write rollouts with unrelated scores and advantages."""
    chance, rollouts, scores, samples = Random(seed), [], [], []
    for row in range(PROBLEMS):
        for sample in range(group):
            text = chance.choice(texts)
            images = [digest_of(chance.choice(pictures))] if pictures else []
            tokens, right = tokenizer.encode(text).ids, float(chance.random() < 0.5)
            place = {"prompt_row": row, "sample": sample}
            logprobs = [-chance.random() for _ in tokens]
            rollouts.append({
                **place, "prompt_id": f"train-{row}", "prompt": f"train problem {row}?", "completion": text,
                "answer": "1", "prompt_tokens": [1], "images": images, "completion_tokens": tokens,
                "logprobs": logprobs, "finish_reason": "stop", "seed": row, "turns": None, "messages": None,
                "segments": [{"policy_version": 0, "tokens": len(tokens)}],
            })  # fmt: skip
            scores.append({**place, "reward": right, "reward_right": right, "reward_short": 0.5, "error": None})
            samples.append({
                **place, "tokens": [1, *tokens], "num_prompt_tokens": 1, "images": [], "logprobs": logprobs,
                "advantages": [right - 0.5] * len(tokens), "staleness": [0] * len(tokens),
            })  # fmt: skip
    made = {"rollout": (rollouts, ROLLOUT_SCHEMA), "scoring": (scores, score_schema(("right", "short")))}
    made["credit"] = (samples, SAMPLE_SCHEMA)
    parts = {
        kind: write_shard(run.store, pa.Table.from_pylist(rows, schema=schema), kind=kind, metadata={})
        for kind, (rows, schema) in made.items()
    }
    media = [write_shard(run.store, each, kind=MEDIA, metadata={}) for each in media_tables(pictures)]
    return parts | {MEDIA: media[0]} if media else parts


def _made(number: int, worker: str, seconds: float) -> Provenance:
    created = (BEGUN + timedelta(minutes=number)).isoformat(timespec="milliseconds")
    return Provenance(worker=f"{worker} pid 1", created=created, seconds={"worker": seconds, "stage": seconds})


def _write_batch(run: Run, key: str, number: int, parts: dict[str, ShardRef], *, split: str, group: int) -> None:
    plan = BatchPlan(
        key=key, number=number, split=split, rows=tuple(range(PROBLEMS)), group_size=group, shard_prompts=PROBLEMS,
        sampling=SamplingConfig(), policy=StageKey.policy(0),
    )  # fmt: skip
    _put(
        run, Manifest(key=plan.plan_key, detail=plan.model_dump(mode="json"), provenance=_made(number, "controller", 0))
    )
    for stage, worker in (("rollout", "rollout-0-0"), ("scoring", "scoring-0-0")):
        shards = (parts[stage], parts[MEDIA]) if stage == "rollout" and MEDIA in parts else (parts[stage],)
        made = Manifest(key=plan.shard_key(stage, 0), shards=shards, provenance=_made(number, worker, 2.0))
        _put(run, made)


def _write_iteration(run: Run, number: int, parts: dict[str, ShardRef], group: int) -> None:
    key, share = iteration_key(number), number / (number + 20)
    _write_batch(run, key, number, parts, split="train", group=group)
    _put(run, Manifest(key=f"{key}/credit", shards=(parts["credit"],), provenance=_made(number, "scoring-0-0", 0.5)))
    metrics = {
        "prompts": PROBLEMS, "credit/missing": 0, "credit/reward_mean": share, "credit/length_mean": 40 + number / 7,
        "credit/term_right_mean": share, "credit/term_short_mean": 1 - share,
        "credit/truncated_fraction": 1 / (9 + number),
        "credit/informative_groups": 30, "credit/groups": PROBLEMS, "credit/reward_std": 0.4,
        "update/entropy": 3 * (1 - share), "update/kl_old": 1e-3 / number, "update/grad_norm_mean": 1 / 3,
        "update/grad_norm_max": 2 / 3, "update/clip_fraction_low": share / 9, "update/clip_fraction_high": share / 8,
        "update/mismatch_tokens": 9, "update/mismatch_difference_mean": 1e-7 * number, "update/loss": -share,
        "update/mismatch_difference_max": 1e-6 * number, "update/quarantined": 0,
    }  # fmt: skip
    seconds = {
        "rollout": 2.0 + share,
        "scoring": 1.0,
        "credit": 0.1,
        "update": 3.0 - share,
        "estimates": 0.0,
        "total": 7.0,
    }
    seconds |= {"weights_seconds": 0.1, "weights_bytes": 1000.0}
    costs = {
        "rollout": Cost(prompt_tokens=900, written_tokens=9000 + number, worker_seconds=4.0),
        "update": Cost(price=0.1),
    }
    created = _made(number, "controller", 0).created
    _put(
        run,
        Manifest(
            key=f"{key}/seal",
            metrics=metrics,
            detail={"policy": f"{number:064x}"},
            provenance=Provenance(created=created, seconds=seconds, costs=costs),
        ),
    )


def _write_evaluation(run: Run, number: int, parts: dict[str, ShardRef], group: int) -> None:
    key, share = evaluation_key(number), number / (number + 20)
    _write_batch(run, key, number, parts, split="heldout", group=group)
    metrics = {"accuracy": share, "squares": share * PROBLEMS, "problems": PROBLEMS, "samples": group}
    _put(run, Manifest(key=f"{key}/summary", metrics=metrics))
