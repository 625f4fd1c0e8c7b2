"""Worker that generates completions.

It reads a shard of prompts, and writes a shard of finished groups and a shard of groups to be continued.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import torch
from pydantic import JsonValue

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import BundleRef, fetch_bundle, verify_while_reading
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.staging import find_readable_store
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import EngineConfig
from rheostat.models.config.environments import EnvironmentConfig
from rheostat.models.engines.protocol import (
    Completion,
    ImageEngine,
    RecordsExperts,
    Request,
    VisionEngine,
    build_engine,
)
from rheostat.models.environments.runtimes import build_runtime
from rheostat.models.records.media import MEDIA, Media
from rheostat.models.records.pictures import build_picture_table
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.versions import ModelVersion, Outcome, order_statistics
from rheostat.models.records.work import RolloutWork
from rheostat.models.rollouts.groups import Group, PartialCompletion, build_table, fresh_groups, read_groups

logger = logging.getLogger(__name__)

WEIGHTS = ".safetensors"
"""File name extension of weights. An engine verifies the digests of such files while it loads them."""


class RolloutWorker:
    """Worker that generates completions with the policy that each work unit names. Only verified weights are used.

    With a deterministic engine, the same work gives shards of the same digests in any worker process with the same
    number of threads on the same kind of machine, whatever the worker did before. With vLLM this holds up to float
    rounding.
    """

    def __init__(
        self,
        store_uri: str,
        run: str,
        engine: EngineConfig,
        threads: int,
        adapter_rank: int = 0,
        environment: EnvironmentConfig | None = None,
        records_experts: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        self._store = run_store(store_uri, run)
        self._run = run
        self._engine = build_engine(engine, adapter_rank=adapter_rank)
        if records_experts and isinstance(self._engine, RecordsExperts):
            self._engine.record_experts(True)
        self._environment = None if environment is None else build_runtime(environment)
        self._moved_bytes, self._moving_seconds = 0, 0.0

    def progress(self) -> int:
        """Return the number of decoding steps and model loads so far. If the number stops growing, the worker is
        stuck."""
        return self._engine.progress + (0 if self._environment is None else self._environment.progress)

    def take(self, policy: ModelVersion) -> str:
        """Load policy version `policy` unless the engine already serves it, and return the digest of the served
        policy."""
        self._load(policy)
        return policy.digest

    def sleep(self) -> None:
        """Release the memory of the policy, so that another worker can use the GPU. The next work unit loads the policy
        again."""
        self._engine.sleep()
        if self._environment is not None:
            self._environment.sleep()

    def close(self) -> None:
        """Close the engine, and the environment if there is one."""
        self._engine.close()
        if self._environment is not None:
            self._environment.close()

    def _load(self, policy: ModelVersion) -> None:
        if self._engine.loaded_digest() == policy.digest:
            return
        started = time.perf_counter()
        adapter = None if policy.adapter is None else self._fetch(policy.adapter)
        store = find_readable_store(self._store, policy.weights)
        try:
            with verify_while_reading(store, policy.weights, large_suffix=WEIGHTS) as directory:
                self._moved_bytes += self._engine.load(directory, policy, adapter=adapter)
        except Damaged:
            self._engine.sleep()  # the engine may have loaded something other than the policy
            raise
        self._moving_seconds += time.perf_counter() - started
        logger.info("Loaded policy %s", policy.digest)

    def _fetch(self, bundle: BundleRef) -> Path:
        return fetch_bundle(find_readable_store(self._store, bundle), bundle)

    def _take_load_metrics(self) -> dict[str, float]:
        """Return the bytes and seconds of weight loading since the last call of this method, including loads by
        `take`."""
        metrics = {"weights_bytes": float(self._moved_bytes), "weights_seconds": self._moving_seconds}
        self._moved_bytes, self._moving_seconds = 0, 0.0
        return metrics

    def generate(self, work: RolloutWork) -> Outcome:
        """Generate the completions of the work unit's prompts and write the finished groups as the first shard, which
        may be empty. If the token budget cut a completion, its group is written to a second shard and continues later.
        Raises BadInput if the engine cannot do the work."""
        clock = time.perf_counter
        started = clock()
        self._load(work.policy)
        loaded, before = clock(), self._engine.step_sums()
        drafts = self._open_groups(work)
        self._set_images(work)
        groups = self._complete(drafts, work)
        generated = clock()
        finished, cut = (
            build_table([group for group in groups if group.is_finished is done]) for done in (True, False)
        )
        shards = [self._write(finished, work, kind="rollouts")]
        lengths = _count_new_tokens(drafts, groups, work.policy.version)
        detail: dict[str, JsonValue] = {"lengths": order_statistics(lengths)}
        if work.denoising is not None:
            shards.append(self._write(_build_picture_table(groups), work, kind=MEDIA))
        if cut.num_rows:
            shards.append(self._write(cut, work, kind="unfinished"))
            detail["carried_rows"] = [*sorted(group.prompt_row for group in groups if not group.is_finished)]
        return Outcome(
            shards=tuple(shards),
            metrics=_count_tokens_and_groups(groups, lengths)
            | {"prompt_tokens": sum(group.drafts[0].input.num_prompt_tokens for group in drafts)}
            | _count_dropped_tokens(drafts, groups, work.policy.version),
            detail=detail,
            timings={"load": loaded - started, "generate": generated - loaded, "write": clock() - generated}
            | self._take_load_metrics()
            | self._engine.step_sums().since(before)
            | ({} if self._environment is None else self._environment.pop_times()),
        )

    def _complete(self, drafts: Sequence[Group], work: RolloutWork) -> list[Group]:
        """Generate the missing tokens of all unfinished completions (`drafts`). In episodes, the environment replies
        between turns."""
        if self._environment is not None:
            directory = self._fetch(work.policy.weights)
            if work.user is not None:
                self._environment.load(fetch_bundle(self._store, work.user.weights), work.user)
            return self._environment.run_episodes(drafts, self._engine, work, directory=directory, store=self._store)
        if isinstance(self._engine, RecordsExperts):
            self._engine.record_experts(work.records_experts)
        elif work.records_experts:
            raise BadInput(
                "update.router_replay needs an engine that records the chosen experts, but the engine "
                f"{self._engine.producer()} has no method `record_experts`. Remove update.router_replay, or use "
                "another engine"
            )
        requests = [group.build_request(work.policy.version, work.partial) for group in drafts]
        if work.denoising is None:
            answers = self._engine.generate(requests, work.sampling)
        else:
            answers = self._generate_pictures(requests, work, work.denoising)
        return [group.append_completions(new, work.policy.version) for group, new in zip(drafts, answers, strict=True)]

    def _generate_pictures(
        self, requests: Sequence[Request], work: RolloutWork, denoising: DenoisingConfig
    ) -> list[list[Completion]]:
        """Generate images with a text-to-image policy, without noise in the denoising steps if the sampling temperature
        is 0."""
        if not isinstance(self._engine, ImageEngine):
            raise BadInput(
                "text-to-image policies need an engine that generates pictures, but the engine "
                f"{self._engine.producer()} has no method `generate_images`. Set rollout.engine.kind = 'diffusers'"
            )
        trained_steps = range(0) if work.sampling.temperature == 0 else _sample_window(work, denoising)
        return self._engine.generate_images(requests, denoising, trained_steps)

    def _set_images(self, work: RolloutWork) -> None:
        """Set the source from which the engine reads the prompts' images. Raises BadInput if the engine cannot use
        images."""
        if not work.media:
            return
        if not isinstance(self._engine, VisionEngine):
            raise BadInput(
                f"the prompts have images, but the engine {self._engine.producer()} cannot process images, because it "
                "has no method `show`. Use another rollout.engine.kind"
            )
        self._engine.show(Media(self._store, work.media))

    def _open_groups(self, work: RolloutWork) -> list[Group]:
        """Return the groups that the work unit continues, followed by its new groups in the order of the prompt
        shard."""
        prompts = read_shard(self._store, work.prompts)
        continued = read_groups(read_shard(self._store, work.continued), prompts) if work.continued else []
        rows = _sort_rows(work, {group.prompt_row for group in continued})
        new = prompts.take(pa.array(rows, pa.int64()))
        fresh = fresh_groups(new, rows, group_size=work.group_size, seed=work.seed, iteration=work.iteration)
        return continued + fresh

    def _write(self, table: pa.Table, work: RolloutWork, *, kind: str) -> ShardRef:
        metadata = _build_metadata(work, run=self._run) | {"producer": self._engine.producer()}
        return write_shard(self._store, table, kind=kind, metadata=metadata)


def _sample_window(work: RolloutWork, denoising: DenoisingConfig) -> range | None:
    """Return the range of denoising steps that are trained in this iteration, or None if all steps that have noise are
    trained. The range is sampled once per iteration and is the same for all images."""
    window = denoising.window
    if window is None:
        return None
    places = window.last - window.first + 1
    first = window.first + derive_seed("window", work.seed, work.iteration) % places
    return range(first, first + window.size)


def _build_picture_table(groups: Sequence[Group]) -> pa.Table:
    ordered = sorted(groups, key=lambda group: group.prompt_row)
    pictures = ((group.prompt_row, draft.picture) for group in ordered for draft in group.drafts)
    return build_picture_table((row, picture) for row, picture in pictures if picture is not None)


def _count_new_tokens(drafts: Sequence[Group], groups: Sequence[Group], version: int) -> list[int]:
    """Return the number of tokens that this work unit generated for each completion with policy version `version`.
    Completions that were already finished in `drafts` are left out."""
    return [new.count_tokens_of(version) for _, new in _pair_unfinished(drafts, groups)]


def _count_dropped_tokens(drafts: Sequence[Group], groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the number of tokens of earlier policy versions that completions do not contain any more, because a
    restarted agent sent other requests. Empty if there are none."""
    pairs = _pair_unfinished(drafts, groups)
    dropped = sum(old.num_generated + new.count_tokens_of(version) - new.num_generated for old, new in pairs)
    return {"dropped_tokens": float(dropped)} if dropped else {}


def _pair_unfinished(
    drafts: Sequence[Group], groups: Sequence[Group]
) -> Iterator[tuple[PartialCompletion, PartialCompletion]]:
    """Yield each completion that was unfinished in `drafts`, before and after it was continued."""
    for before, after in zip(drafts, groups, strict=True):
        for old, new in zip(before.drafts, after.drafts, strict=True):
            if old.finish_reason is FinishReason.CUT:
                yield old, new


def _sort_rows(work: RolloutWork, continued: set[int]) -> list[int]:
    """Return the prompt rows for which the work unit requests new groups, in ascending order. `continued` are the rows
    of groups that it continues. Raises BadInput if a row occurs twice, because both groups would use the same seeds, or
    if it is not in the shard."""
    rows = sorted(set(work.rows))
    if len(rows) < len(work.rows) or not (rows or continued) or continued & set(rows):
        also = f" or again besides the continued rows {sorted(continued)}" if continued else ""
        raise BadInput(
            f"a rollout work unit must list at least one prompt row, and no row twice{also}, but it lists {work.rows}"
        )
    if rows and not 0 <= rows[0] <= rows[-1] < work.prompts.rows:
        raise BadInput(
            f"a rollout work unit must list rows of the prompt shard {work.prompts.key}, which has the rows 0 to "
            f"{work.prompts.rows - 1}, but it lists {work.rows}"
        )
    return rows


def _build_metadata(work: RolloutWork, *, run: str) -> dict[str, str]:
    """Return the metadata of a rollout shard: the policy version that generated its last tokens, and the inputs of the
    work unit.

    Seeds of new groups are derived from `seed`, iteration, prompt row and sample. The rows of continued groups contain
    their seeds and the earlier policy versions.
    """
    metadata = {
        "run": run,
        "iteration": str(work.iteration),
        "policy_version": str(work.policy.version),
        "policy_digest": work.policy.digest,
        "sampling": work.sampling.model_dump_json(),
        "prompts_digest": work.prompts.digest,
        "seed": str(work.seed),
        "seed_samples": f"0..{work.group_size - 1}",
    }
    if work.rows:
        metadata["seed_prompt_rows"] = f"{min(work.rows)}..{max(work.rows)}"
    if work.denoising is not None:
        metadata["denoising"] = work.denoising.model_dump_json()
    if work.partial is not None:
        metadata["partial"] = work.partial.model_dump_json(exclude_none=True)
    if work.continued is not None:
        metadata["continued_digest"] = work.continued.digest
    return metadata


def _count_tokens_and_groups(groups: list[Group], lengths: list[int]) -> dict[str, float]:
    """Return the numbers of finished and unfinished groups, of completions in finished groups, and of new tokens.
    `lengths` contains the number of new tokens of each completion that this work unit continued or began."""
    finished = [draft for group in groups if group.is_finished for draft in group.drafts]
    return {
        "groups": sum(group.is_finished for group in groups),
        "carried_groups": sum(not group.is_finished for group in groups),
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "completions": len(finished),
        "truncated": sum(draft.finish_reason is FinishReason.LENGTH for draft in finished),
    }
