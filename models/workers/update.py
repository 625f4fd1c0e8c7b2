"""The worker that learns: training samples in by reference, a new policy version out; one process per rank."""

import logging
import time
from dataclasses import replace

import torch

from infra.bundles import fetch_bundle
from infra.errors import BadInput
from infra.storage import open_store
from models.algorithms.config import AlgorithmConfig
from models.batching import plan_steps
from models.objectives.config import KlPenalty, UpdateConfig
from models.records import Outcome, PolicyVersion
from models.roles.adapters import load_trainable
from models.roles.learner import Learner
from models.roles.logprobs import TokenLogprobs
from models.roles.policy import load_policy
from models.roles.ranks import Ranks, join_ranks
from models.roles.update_steps import StepPasses, StepsTaken, extra_logprobs, prepare, take_steps
from models.samples import Samples, open_samples
from models.schedule import learning_rate
from models.work import JudgeWarmupWork, PreferenceWork, RewardModelWork, UpdateWork, WarmupWork
from models.workers.offline import OfflineTrainer

logger = logging.getLogger(__name__)


class UpdateWorker:
    """Take optimizer steps from the policy that each piece of work names, whatever the worker did before.

    The same work gives the same weights and the same optimizer state, bit for bit, hot or loaded anew, on as many
    ranks and threads. All ranks must be asked at once; each returns the same outcome, timings aside.
    """

    def __init__(
        self,
        store_uri: str,
        run: str,
        *,
        update: UpdateConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        threads: int,
    ) -> None:
        if temperature <= 0:
            raise BadInput(f"rollout.sampling.temperature: training needs more than 0, found {temperature}")
        torch.set_num_threads(threads)
        self._store = open_store(f"{store_uri}/{run}")
        self._update = update
        self._algorithm = algorithm
        self._temperature = temperature
        self._ranks: Ranks | None = None
        self._policy: Learner | None = None
        self._reference: tuple[str, TokenLogprobs] | None = None
        self._progress = 0

    def join(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        """Meet the other ranks before any work. A rank that is lost takes the group, and so its processes, with it."""
        self._ranks = join_ranks(rank, world_size, address=master_address, port=master_port)

    def progress(self) -> int:
        """Return a count that moves with every forward pass."""
        return self._progress

    def update(self, work: UpdateWork) -> Outcome:
        """Take one iteration's steps and publish the next policy version.

        Without a token to learn from, or where anything was not finite, the next version has its parent's very weights
        and state.
        """
        ranks, clock = self._joined(), time.perf_counter
        samples = open_samples(self._store, work.samples)
        if not any(samples.completion_lengths):
            return _unchanged(work, quarantined=False)
        begun = clock()
        policy = self._learner()
        trainer = policy.stand_at(work.policy)
        reference = self._reference_policy(work.reference)
        loaded = clock()
        steps = self._steps(work, samples, ranks)
        extras = extra_logprobs(trainer, steps, config=self._update, reference=reference, beat=self._beat)
        compared = clock()
        taken = take_steps(trainer, steps, extras, config=self._update, ranks=ranks, beat=self._beat)
        stepped = clock()
        if not taken.finite:
            return _unchanged(work, quarantined=True)
        published = policy.publish(work.policy, version=work.policy.version + 1)
        return Outcome(
            policy=published,
            metrics=_metrics(taken, samples, steps),
            timings={
                "load": loaded - begun,
                "logprobs": compared - loaded,
                "steps": stepped - compared,
                "save": clock() - stepped,
            },
        )

    def warmup(self, work: WarmupWork) -> Outcome:
        """Imitate worked examples and publish a policy without optimizer state."""
        return self._offline().warmup(work)

    def warm_judge(self, work: JudgeWarmupWork) -> Outcome:
        """Train a judge on right and wrong completions and publish it."""
        return self._offline().warm_judge(work)

    def prefer(self, work: PreferenceWork) -> Outcome:
        """Train a policy directly on preferences and publish it without optimizer state."""
        return self._offline().prefer(work)

    def train_reward_model(self, work: RewardModelWork) -> Outcome:
        """Train a reward model on preferences and publish it."""
        return self._offline().train_reward_model(work)

    def _offline(self) -> OfflineTrainer:
        """Training on data alone, which no policy stands in memory beside."""
        self._learner().close()
        return OfflineTrainer(self._store, self._update, ranks=self._joined(), beat=self._beat)

    def _steps(self, work: UpdateWork, samples: Samples, ranks: Ranks) -> list[StepPasses]:
        config = self._update
        planned = plan_steps(
            samples.groups,
            samples.lengths,
            minibatches=config.minibatches,
            ranks=ranks.world_size,
            microbatch_tokens=config.microbatch_tokens,
            seed=work.seed,
        )
        # Where groups without weight are all that a step has, only momentum would move the weights.
        plans = [plan for plan in planned if any(samples.completion_lengths[row] for row in plan.rows)]
        first = work.policy.version * config.minibatches
        rates = [
            learning_rate(
                first + index,
                work.total_iterations * config.minibatches,
                peak=config.learning_rate,
                warmup_steps=config.warmup_steps,
                schedule=config.schedule,
            )
            for index in range(len(plans))
        ]
        batches = prepare(samples, plans, config=config, rank=ranks.rank)
        return [StepPasses(batches=part, learning_rate=rate) for part, rate in zip(batches, rates, strict=True)]

    def _learner(self) -> Learner:
        if self._policy is None:
            self._policy = Learner(self._store, self._actor, self._update, ranks=self._joined())
        return self._policy

    def _actor(self, version: PolicyVersion) -> TokenLogprobs:
        model = load_trainable(self._store, version, load=load_policy, lora=self._update.lora)
        return TokenLogprobs(model, temperature=self._temperature)

    def _reference_policy(self, reference: PolicyVersion) -> TokenLogprobs | None:
        """Load the reference once, and only where a penalty needs it."""
        if not isinstance(self._update.kl, KlPenalty):
            return None
        if self._reference is None or self._reference[0] != reference.weights.digest:
            self._reference = None
            model = load_policy(fetch_bundle(self._store, reference.weights)).requires_grad_(False).eval()
            policy = TokenLogprobs(model, temperature=self._temperature)
            self._reference = (reference.weights.digest, policy.to(self._joined().device))
        return self._reference[1]

    def _joined(self) -> Ranks:
        if self._ranks is None:
            raise BadInput("update rank: join the other ranks before asking for work")
        return self._ranks

    def _beat(self) -> None:
        self._progress += 1


def _unchanged(work: UpdateWork, *, quarantined: bool) -> Outcome:
    parent = work.policy
    if quarantined:
        logger.warning(
            "iteration %d: a loss, log-prob, advantage or gradient was not finite; "
            "its update is discarded and policy %d keeps the weights of policy %d",
            work.iteration,
            parent.version + 1,
            parent.version,
        )
    return Outcome(
        policy=replace(parent, version=parent.version + 1),
        metrics={
            "quarantined": float(quarantined),
            "steps": 0.0,
            "samples": float(sum(shard.rows for shard in work.samples)),
        },
        timings={},
    )


def _metrics(taken: StepsTaken, samples: Samples, steps: list[StepPasses]) -> dict[str, float]:
    sums, maxima = dict(taken.sums), dict(taken.maxima)
    del sums["not_finite"]
    num_tokens, num_first = sum(samples.completion_lengths), sums.pop("mismatch_tokens")
    metrics = {"loss": sums.pop("loss") / len(steps)}
    for name, total in sums.items():
        metrics[name] = total / (num_first if name.startswith("mismatch") else num_tokens)
    return (
        metrics
        | maxima
        | {
            "grad_norm_mean": sum(taken.grad_norms) / len(steps),
            "grad_norm_max": max(taken.grad_norms),
            "learning_rate": steps[-1].learning_rate,
            "steps": float(len(steps)),
            "tokens": float(num_tokens),
            "samples": float(len(samples.groups)),
            "quarantined": 0.0,
        }
    )
