"""Worker that trains a policy on shards of training samples and publishes a new version. Each rank is a process."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.layout import AuxiliaryForward
from rheostat.models.records.media import Media
from rheostat.models.records.versions import ModelVersion, Outcome, StageTimer
from rheostat.models.records.work import (
    EstimateWork,
    JudgeWarmupWork,
    PreferenceWork,
    ProcessModelWork,
    RewardModelWork,
    UpdateWork,
    UserWarmupWork,
    WarmupWork,
)
from rheostat.models.training.auxiliary import (
    AuxiliaryModels,
    choose_teachers,
    load_auxiliary_models,
    write_auxiliary_scores,
)
from rheostat.models.training.forward_steps import forward_metrics, take_forward_steps
from rheostat.models.training.moving_average import publish_average
from rheostat.models.training.publishing import Put, make_version_durable
from rheostat.models.training.ranks import join_ranks
from rheostat.models.training.repeats import Repeater
from rheostat.models.training.samples import TrainingSamples, open_samples, require_top_tokens
from rheostat.models.training.step_plans import StepBatches, plan_critic_steps, plan_policy_steps
from rheostat.models.training.trainer import Trainer
from rheostat.models.training.update_steps import (
    StepStatistics,
    compute_extra_logprobs,
    take_steps,
    take_value_steps,
    update_metrics,
    value_metrics,
)
from rheostat.models.training.versions import LoadedModels, ResidentTrainer
from rheostat.models.workers.offline import OfflineTrainer
from rheostat.models.workers.teacher_inputs import TeacherInputs

logger = logging.getLogger(__name__)


class UpdateWorker:
    """Worker that trains the models that each work unit names. Collective: all ranks must be called with the same work,
    and return the same outcome except timings. The result does not depend on earlier work units. The same work gives
    the same weights and optimizer state, bit for bit, with models in memory or loaded again, on the same number of
    ranks and threads. A missing optimizer state is restored by repeating the updates since an earlier state."""

    def __init__(
        self,
        store_uri: str,
        run: str,
        *,
        update: UpdateConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        threads: int,
        denoising: DenoisingConfig | None = None,
    ) -> None:
        if temperature <= 0:
            raise BadInput(f"rollout.sampling.temperature is {temperature}, but training needs more than 0. Raise it")
        torch.set_num_threads(threads)
        self._store = run_store(store_uri, run)
        self._update = update
        self._algorithm = algorithm
        self._temperature = temperature
        self._denoising = denoising
        self._models: LoadedModels | None = None
        self._progress = 0
        self._repeated = dict[str, float]()
        """Metric of the updates that the current work unit had to repeat. Empty if it repeated none."""

    def join(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        """Join the other ranks before any work. If a rank is lost later, the group and its processes must be
        replaced."""
        slices = self._update.sequence_parallel
        ranks = join_ranks(rank, world_size, address=master_address, port=master_port, sequence_parallel=slices)
        self._models = LoadedModels(
            self._store,
            self._update,
            temperature=self._temperature,
            denoising=self._denoising,
            top_k=self._algorithm.teacher_top_k,
            ranks=ranks,
            on_progress=self._on_progress,
        )

    def progress(self) -> int:
        """Return the number of forward passes and written state pieces. If it stops growing, the worker is stuck."""
        return self._progress

    def close(self) -> None:
        """Finish writing optimizer states, end the thread that writes them, and release the memory of all models."""
        if self._models is not None:
            self._models.states.close()
            self._models.close()

    def release_unused_memory(self) -> None:
        """Return GPU memory that PyTorch keeps for later use to the driver, so that other processes can use it."""
        torch.cuda.empty_cache()

    def estimate(self, work: EstimateWork) -> Outcome:
        """Compute the per-token outputs of reference, critic or teacher for the advantages. No model is trained."""
        models, timer = self._require_models(), StageTimer()
        self._show(work.media)
        distillation = self._algorithm.distillation
        has_images = distillation is not None or self._update.shards_weights

        teacher_inputs = TeacherInputs(self._store, work, distillation)

        def load(teacher: int) -> dict[str, AuxiliaryForward]:
            timer.end("estimate")
            forwards = load_auxiliary_models(
                self._store, work, models, self._algorithm, teacher=teacher, on_progress=self._on_progress
            )
            timer.end("load")
            return forwards

        scores = write_auxiliary_scores(
            self._store,
            work,
            AuxiliaryModels(
                load,
                choose_teachers(self._store, work, distillation),
                self._algorithm.teacher_top_k,
                teacher_inputs.build,
            ),
            microbatch_tokens=self._update.microbatch_tokens,
            ranks=models.ranks,
            images=models.image_tokens(work.policy) if has_images else None,
            step_tokens=models.step_tokens(work.policy),
        )
        timer.end("estimate")
        metrics = {"sequences": float(scores.sequences), "tokens": float(scores.tokens), **teacher_inputs.metrics}
        return Outcome(shards=scores.shards, metrics=metrics, timings=timer.seconds)

    def update(self, work: UpdateWork) -> Outcome:
        """Take one iteration's optimizer steps and publish the next version of the policy and of its critic, if any.
        If the reference is a moving average of the policies, publish the next reference, too. The files may be used at
        once, but are durable only after `sync`. Optimizer states are named now and written in the background; they are
        stored when the next update ends. The next versions keep their parents' weights and state if there is no token
        to train on or a value is not finite. So does a policy that is not trained yet."""
        outcome = self._train(work)
        if work.ema_decay is None or outcome.model is None:
            return outcome
        timer = StageTimer()
        average = publish_average(
            self._store,
            outcome.model.weights,
            work.reference.weights,
            decay=work.ema_decay,
            ranks=self._require_models().ranks,
            put=_choose_put(work),
            on_progress=self._on_progress,
        )
        timer.end("average")
        return replace(outcome, average=average, timings={**(outcome.timings or {}), **timer.seconds})

    def _train(self, work: UpdateWork) -> Outcome:
        """Take one iteration's optimizer steps and publish the next version of the policy and of its critic, if any."""
        models, timer = self._require_models(), StageTimer()
        self._repeated = {}
        self._show(media for update in (*work.past, work) for media in update.media)
        samples = open_samples(self._store, work.samples)
        if self._algorithm.teacher_top_k:
            require_top_tokens(samples)
        steps = self._steps(work, samples)
        policy_steps_taken, value_steps_taken, finite = None, None, True
        if steps:
            if work.learns:
                policy_steps_taken = self._train_policy(work, self._load_actor(work, timer), steps, timer)
            if work.critic is not None and (policy_steps_taken is None or policy_steps_taken.is_finite):
                value_steps_taken = self._train_critic(work, self._load_valuer(work, timer), steps, timer)
            finite = all(taken.is_finite for taken in (policy_steps_taken, value_steps_taken) if taken is not None)
        if not steps or not finite:
            models.states.wait()
            return self._keep_version(work, quarantined=not finite)
        model, critic = self._publish(work, timer)
        policy_metrics = dict[str, float]()
        if policy_steps_taken is not None:
            stale = self._update.max_staleness
            summarize = forward_metrics if self._update.loss.uses_forward_process else update_metrics
            policy_metrics = summarize(policy_steps_taken, samples, steps, max_staleness=stale)
        return Outcome(
            model=model,
            critic=critic,
            metrics={
                **self._coefficients(work),
                **self._repeated,
                **policy_metrics,
                **({} if value_steps_taken is None else value_metrics(value_steps_taken)),
                "steps": float(len(steps)),
                "tokens": float(sum(samples.trained_lengths)),
                "samples": float(len(samples.groups)),
                "quarantined": 0.0,
            },
            timings=timer.seconds,
        )

    def _show(self, media: Iterable[ShardRef]) -> None:
        """Set the shards from which the images of prompts are read. A shard used by several work units is opened
        once."""
        self._require_models().images.source = Media(self._store, [*dict.fromkeys(media)])

    def _publish(self, work: UpdateWork, timer: StageTimer) -> tuple[ModelVersion, ModelVersion | None]:
        """Publish the trained policy and critic for immediate use, and start to write their optimizer states."""
        models, following = self._require_models(), work.policy.version + 1
        put = _choose_put(work)
        model, critic = _build_next_version(work.policy), None
        state = critic_state = None  # the copies run while weights are written
        if work.keeps_state and work.learns:
            state = models.states.copy(models.policy.trainer)
        if work.keeps_state and work.critic is not None:
            critic_state = models.states.copy(models.critic.trainer)
        if work.learns:
            model = models.policy.publish(work.policy, version=following, put=put)
        else:
            models.policy.relabel(work.policy, model)
        if work.critic is not None:
            critic = models.critic.publish(work.critic, version=following, put=put)
        timer.end("save")
        models.states.wait()
        if state is not None:
            model = replace(model, state=models.states.begin(state))
        if critic is not None and critic_state is not None:
            critic = replace(critic, state=models.states.begin(critic_state))
        if work.is_last:
            models.states.wait()
        timer.end("state")
        return model, critic

    def sync(self, bundles: Sequence[BundleRef]) -> Outcome:
        """Make published weights durable (synced to disk or uploaded), after which a manifest may name them."""
        for bundle in bundles:
            make_version_durable(self._store, bundle, ranks=self._require_models().ranks, on_progress=self._on_progress)
        return Outcome()

    def warmup(self, work: WarmupWork) -> Outcome:
        """Fine-tune the policy on worked examples and publish it without an optimizer state."""
        return self._offline().warmup(work)

    def warm_judge(self, work: JudgeWarmupWork) -> Outcome:
        """Fine-tune a judge to rate correct and incorrect completions, and publish it."""
        return self._offline().warm_judge(work)

    def warm_user(self, work: UserWarmupWork) -> Outcome:
        """Fine-tune the simulated user (the model that plays the user) and publish it."""
        return self._offline().warm_user(work)

    def prefer(self, work: PreferenceWork) -> Outcome:
        """Train a policy on preference pairs with DPO and publish it without an optimizer state."""
        return self._offline().prefer(work)

    def train_reward_model(self, work: RewardModelWork) -> Outcome:
        """Train a reward model on preference pairs and publish it."""
        return self._offline().train_reward_model(work)

    def train_process_model(self, work: ProcessModelWork) -> Outcome:
        """Train a process reward model on step labels and publish it."""
        return self._offline().train_process_model(work)

    def _offline(self) -> OfflineTrainer:
        """Release the memory of policy and critic, and return a trainer for fixed data such as worked examples."""
        models = self._require_models()
        models.close()
        return OfflineTrainer(
            self._store, self._update, denoising=self._denoising, ranks=models.ranks, on_progress=self._on_progress
        )

    def _load_actor(self, work: UpdateWork, timer: StageTimer) -> Trainer:
        """Return the trainer with the policy version from which the work unit starts."""

        def learn(past: UpdateWork, trainer: Trainer) -> StepStatistics:
            return self._train_policy(past, trainer, self._past_steps(past), StageTimer())

        past = [update for update in work.past if update.learns]
        versions = [update.policy for update in (*past, work)]
        return self._restore_trainer(
            self._require_models().policy, versions, replace(work, past=tuple(past)), learn, timer
        )

    def _load_valuer(self, work: UpdateWork, timer: StageTimer) -> Trainer:
        """Return the trainer with the critic version from which the work unit starts."""

        def learn(past: UpdateWork, trainer: Trainer) -> StepStatistics:
            return self._train_critic(past, trainer, self._past_steps(past), StageTimer())

        versions = [update.critic for update in (*work.past, work) if update.critic is not None]
        return self._restore_trainer(self._require_models().critic, versions, work, learn, timer)

    def _restore_trainer(
        self,
        resident: ResidentTrainer,
        versions: Sequence[ModelVersion],
        work: UpdateWork,
        learn: Callable[[UpdateWork, Trainer], StepStatistics],
        timer: StageTimer,
    ) -> Trainer:
        """Return a trainer with the last of `versions` and its optimizer state. If it is not in memory, load the first
        of `versions` and repeat the updates after it with `learn`."""
        trainer, models = resident.take_over(versions[-1]), self._require_models()
        if trainer is None:
            repeater = Repeater(models.states, models.ranks)
            trainer, difference = repeater.restore(resident, versions, work, learn=learn, timer=timer)
            if difference is not None:
                self._repeated["repeated_difference"] = max(difference, self._repeated.get("repeated_difference", 0.0))
        timer.end("load")
        return trainer

    def _past_steps(self, work: UpdateWork) -> list[StepBatches]:
        return self._steps(work, open_samples(self._store, work.samples))

    def _steps(self, work: UpdateWork, samples: TrainingSamples) -> list[StepBatches]:
        models = self._require_models()
        return plan_policy_steps(
            samples,
            work,
            config=self._update,
            ranks=models.ranks,
            images=models.image_tokens(work.policy),
            step_tokens=models.step_tokens(work.policy),
        )

    def _train_policy(
        self, work: UpdateWork, trainer: Trainer, steps: list[StepBatches], timer: StageTimer
    ) -> StepStatistics:
        models, config = self._require_models(), self._update
        reference = means = None
        if config.kl_penalty is not None and models.generates_images:
            means = models.reference_means(work.reference, policy=work.policy)
        elif config.kl_penalty is not None:
            reference = models.reference(work.reference, policy=work.policy)
        models.announce_prompts(each for step in steps for batch in step.batches for each in batch.microbatch.inputs)
        timer.end("load")
        if config.loss.uses_forward_process:
            steps_taken = take_forward_steps(
                trainer,
                steps,
                config=config,
                reference=means,
                kl_coefficient=work.kl_coefficient,
                ranks=models.ranks,
                on_progress=self._on_progress,
            )
            timer.end("steps")
            return steps_taken
        extras = compute_extra_logprobs(
            trainer, steps, config=config, ranks=models.ranks, reference=reference, on_progress=self._on_progress
        )
        timer.end("logprobs")
        steps_taken = take_steps(
            trainer,
            steps,
            replace(extras, means=means, distillation=self._algorithm.distillation),
            config=config.with_entropy_at(work.policy.version, work.total_iterations),
            kl_coefficient=work.kl_coefficient,
            ranks=models.ranks,
            on_progress=self._on_progress,
        )
        timer.end("steps")
        return steps_taken

    def _train_critic(
        self, work: UpdateWork, trainer: Trainer, steps: list[StepBatches], timer: StageTimer
    ) -> StepStatistics:
        models, config = self._require_models(), self._algorithm.value_model
        assert config is not None, "an update with a critic needs an algorithm with a critic"
        own_steps = plan_critic_steps(
            steps, work, config=self._update.model_copy(update={"learning_rate": config.learning_rate})
        )
        steps_taken = take_value_steps(
            trainer, own_steps, clip=config.clip, ranks=models.ranks, on_progress=self._on_progress
        )
        timer.end("critic")
        return steps_taken

    def _keep_version(self, work: UpdateWork, *, quarantined: bool) -> Outcome:
        if quarantined:
            logger.warning(
                "iteration %d: a loss, log-prob, advantage or gradient was not finite; "
                "its update is discarded and policy %d keeps the weights of policy %d",
                work.iteration,
                work.policy.version + 1,
                work.policy.version,
            )
        models, model = self._require_models(), _build_next_version(work.policy)
        models.policy.relabel(work.policy, model)
        critic = None if work.critic is None else _build_next_version(work.critic)
        if work.critic is not None and critic is not None:
            models.critic.relabel(work.critic, critic)
        return Outcome(
            model=model,
            critic=critic,
            metrics={
                **self._coefficients(work),
                **self._repeated,
                "quarantined": float(quarantined),
                "steps": 0.0,
                "samples": float(sum(shard.rows for shard in work.samples)),
            },
            timings={},
        )

    def _coefficients(self, work: UpdateWork) -> dict[str, float]:
        """Return the coefficients of this iteration as metrics: of the KL penalty and of the entropy bonus, if any."""
        coefficients = {"kl_coefficient": work.kl_coefficient} if self._update.kl_penalty is not None else {}
        bonus = self._update.with_entropy_at(work.policy.version, work.total_iterations).entropy
        return coefficients if bonus is None else {**coefficients, "entropy_coefficient": bonus.coefficient}

    def _require_models(self) -> LoadedModels:
        if self._models is None:
            raise BadInput("this update rank received work before it was connected to the other ranks")
        return self._models

    def _on_progress(self) -> None:
        self._progress += 1


def _choose_put(work: UpdateWork) -> Put:
    """Return the way in which an update stores the files of new versions."""
    return "staged" if work.stages_weights else "early"


def _build_next_version(parent: ModelVersion) -> ModelVersion:
    """Return the next version after an update without a step. It has the weights and optimizer state of `parent`."""
    return replace(parent, version=parent.version + 1)
