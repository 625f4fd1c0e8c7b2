"""Rheostat's workers with a timer, in a separate process: `python -m bench.ddpo_rheostat WORKLOAD`.

These are the workers of a run, without Ray and Prefect. Prompts, images, states, scores, samples, weights and the
optimizer's state are shards and bundles of a store on disk, with digests and fsync.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from bench.ddpo_workload import DrawingWorkload, EpochCost, Stopwatch, peak_bytes, serve_epochs
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.denoising import DdimSampler, DenoisingConfig, LearntWindow
from rheostat.models.config.engines import DiffusersEngine, SamplingConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import DiffusionPolicy
from rheostat.models.config.policy_losses import PpoClip
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.denoising.pipeline import read_pipeline
from rheostat.models.denoising.policy import write_diffusion
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork, UpdateWork
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.workers.rollout import RolloutWorker
from rheostat.models.workers.scoring import ScoringWorker
from rheostat.models.workers.update import UpdateWorker
from tests.support.loopback import free_port

RUN = "bench"
ENDLESS = 10**6
"""Total number of iterations that workers are given. It is so large that the run never reaches its last iteration."""


def denoising_of(workload: DrawingWorkload) -> DenoisingConfig:
    """Convert the settings of the benchmark's workload to Rheostat's configuration of the denoising process."""
    window = None if workload.learnt == workload.steps else LearntWindow(size=workload.learnt, first=0, last=2)
    return DenoisingConfig(steps=workload.steps, sampler=DdimSampler(), window=window, guidance=workload.guidance)


@dataclass(slots=True)
class Learning:
    """Diffusion training run: its rollout, scoring and update workers, and the policy being trained."""

    workload: DrawingWorkload
    rollout: RolloutWorker
    scoring: ScoringWorker
    update: UpdateWorker
    prompts: ShardRef
    first: ModelVersion
    policy: ModelVersion

    def take(self) -> EpochCost:
        """Run one training iteration: load the policy, generate and score images, and update the policy.

        Return the CPU seconds, wall-clock seconds and peak memory.
        """
        watch = Stopwatch.started()
        self.rollout.take(self.policy)
        loading_cpu, loading = watch.restart()
        pictures = self._drawn()
        drawing_cpu, drawing = watch.restart()
        self._learn(*pictures)
        training_cpu, training = watch.restart()
        return EpochCost(
            drawing_cpu=loading_cpu + drawing_cpu,
            drawing=loading + drawing,
            training_cpu=training_cpu,
            training=training,
            loading_cpu=loading_cpu,
            peak_bytes=peak_bytes(),
        )

    def _drawn(self) -> tuple[ShardRef, ShardRef]:
        """Generate images for all prompts, score them and compute credit.

        Return the shard of training samples and the shard of images.
        """
        iteration = self.policy.version + 1
        work = RolloutWork(
            iteration=iteration,
            policy=self.policy,
            prompts=self.prompts,
            rows=tuple(range(len(self.workload.prompts))),
            group_size=self.workload.group,
            sampling=SamplingConfig(),
            seed=0,
            denoising=denoising_of(self.workload),
        )
        rollouts, media = self.rollout.generate(work).shards
        [scores] = self.scoring.score(ScoringWork(iteration=iteration, rollouts=rollouts, media=(media,))).shards
        scored = (ScoredShard(rollouts=rollouts, scores=scores),)
        credit = self.scoring.credit(CreditWork(iteration=iteration, shards=scored, policy_version=self.policy.version))
        return credit.shards[0], media

    def _learn(self, samples: ShardRef, media: ShardRef) -> None:
        work = UpdateWork(
            iteration=self.policy.version + 1,
            policy=self.policy,
            reference=self.first,
            samples=(samples,),
            total_iterations=ENDLESS,
            seed=self.policy.version,
            media=(media,),
            exact_behaviour=True,
        )
        outcome = self.update.update(work)
        assert outcome.metrics["steps"] == self.workload.minibatches and not outcome.metrics["quarantined"]
        assert outcome.metrics["tokens"] == self.workload.pictures * self.workload.learnt
        assert outcome.model is not None
        self.policy = outcome.model


def begin(workload: DrawingWorkload) -> Callable[[], EpochCost]:
    """Set up the Rheostat side of the benchmark, and return a function that runs one training epoch.

    Stores the policy and the prompts, and starts the workers in this process.
    """
    home = tempfile.mkdtemp(prefix="rheostat-bench-", dir=workload.trail.parent)
    store = open_store(f"{home}/{RUN}")
    imported = Path(home, "policy")
    imported.mkdir()
    write_diffusion(DiffusionPolicy(path=str(workload.pipeline)), imported, texts=(), seed=0)
    policy = ModelVersion(version=0, weights=publish_bundle(store, imported, prefix="policies"))
    scoring = ScoringConfig.model_validate(
        {"rewards": [{"kind": "target", "target": "tests.support.rewards:brightness"}]}
    )
    denoising, algorithm = denoising_of(workload), Grpo()
    update = UpdateWorker(
        home,
        RUN,
        update=update_config(workload, denoising),
        algorithm=algorithm,
        temperature=1.0,
        threads=1,
        denoising=denoising,
    )
    update.join(0, 1, "127.0.0.1", free_port())
    return Learning(
        workload=workload,
        rollout=RolloutWorker(home, RUN, DiffusersEngine(max_batch_rows=workload.together), 1),
        scoring=ScoringWorker(home, RUN, scoring, algorithm),
        update=update,
        prompts=_prompts(store, imported, workload.prompts),
        first=policy,
        policy=policy,
    ).take


def update_config(workload: DrawingWorkload, denoising: DenoisingConfig) -> UpdateConfig:
    """Return Rheostat's update configuration with the same optimizer settings and batch sizes as TRL's trainer."""
    return UpdateConfig(
        learning_rate=workload.learning_rate,
        weight_decay=workload.weight_decay,
        beta2=0.999,
        minibatches=workload.minibatches,
        microbatch_tokens=workload.states * read_pipeline(workload.pipeline).tokens(denoising),
        loss=PpoClip(clip_low=workload.clip, clip_high=workload.clip),
    )


def _prompts(store: Store, policy: Path, texts: tuple[str, ...]) -> ShardRef:
    tokenizer, count = load_tokenizer(policy), len(texts)
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(count)],
        "text": [*texts],
        "tokens": [tokenizer.encode(text) for text in texts],
        "images": [[]] * count,
        "answer": [""] * count,
        "columns": ["{}"] * count,
        "messages": [None] * count,
    }
    return write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={})


if __name__ == "__main__":
    serve_epochs(begin)
