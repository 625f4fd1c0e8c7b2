"""What people see of training on data alone: losses, held-out pairs, held-out accuracy."""

from prefect import task

from infra.config import Settings
from infra.store.manifests import Manifest
from models.config.judges import JudgeReward, ModelReward, TrainedJudge, TrainedRewardModel
from tasks.judges import local_terms, model_key
from tasks.offline import losses_of
from tasks.plotting import loss_curves
from tasks.reports import Accuracy
from tasks.session import RunRef, session_of
from tasks.stages import required


class TrainedModel(Settings):
    """A model after its training on data alone."""

    name: str
    """`policy`, or the reward term that it serves."""
    path: str
    """Its directory, in Hugging Face format."""
    digest: str
    """Digest of its weights."""
    losses: list[float]
    """The course of its loss in few points."""
    pair_accuracy: float | None
    """Share of held-out pairs in which it prefers what is preferred; none where it learns from no pairs."""
    pairs: int
    """Held-out pairs."""
    seconds: float
    """Time that the training took."""

    def line(self) -> str:
        """The model as one line."""
        pairs = "" if self.pair_accuracy is None else f", {self.pair_accuracy:.3f} of {self.pairs} held-out pairs right"
        return f"{self.name}: loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {self.seconds:.0f} s{pairs}"


class TrainedPolicy(Settings):
    """A policy that was trained on data alone."""

    run: str
    """Name of the run."""
    path: str
    """Where the run lies."""
    policy: TrainedModel
    """The policy."""
    before: Accuracy | None
    """Held-out accuracy before this training; none where no rule says what is right."""
    after: Accuracy | None
    """Held-out accuracy after it."""
    plot: str
    """PNG of the loss."""

    def text(self) -> str:
        """What is told of it at the end."""
        lines = [self.policy.line()]
        if self.before is not None and self.after is not None:
            lines += [f"held-out accuracy before {self.before.line()}", f"                  after  {self.after.line()}"]
        lines += [f"plot     {self.plot}", f"run      {self.path}", f"policy   {self.policy.path}"]
        return "\n".join((*lines, f"digest   {self.policy.digest}"))


class TrainedRewards(Settings):
    """The models behind a run's rewards."""

    run: str
    """Name of the run."""
    path: str
    """Where the run lies."""
    models: tuple[TrainedModel, ...]
    """Those that the run trained."""
    plot: str
    """PNG of their losses."""

    def text(self) -> str:
        """What is told of them at the end."""
        lines = [f"{model.line()}\n         {model.path}" for model in self.models]
        return "\n".join((*lines, f"plot     {self.plot}", f"run      {self.path}"))


@task(task_run_name="report on {key}")
async def report_policy(run: RunRef, key: str, before: Accuracy | None, after: Accuracy | None) -> TrainedPolicy:
    """Gather what is to be told of the policy that was committed under a key, and draw its loss."""
    policy = _trained(run, "policy", required(run, key))
    return TrainedPolicy(
        run=run.name, path=_path(run), policy=policy, before=before, after=after, plot=_plot(run, key, [policy])
    )


@task(task_run_name="report on reward models")
async def report_rewards(run: RunRef) -> TrainedRewards:
    """Gather what is to be told of the reward models that the run trained, and draw their losses."""
    rewards = session_of(run).settings.scoring.local
    trained = [
        _trained(run, term, required(run, model_key(term))) for term in local_terms(run) if _is_trained(rewards[term])
    ]
    return TrainedRewards(run=run.name, path=_path(run), models=tuple(trained), plot=_plot(run, "rewards", trained))


def _is_trained(reward: JudgeReward | ModelReward) -> bool:
    return isinstance(reward.model, TrainedJudge | TrainedRewardModel)


def _trained(run: RunRef, name: str, manifest: Manifest) -> TrainedModel:
    weights = manifest.bundles["weights"]
    return TrainedModel(
        name=name,
        path=str(session_of(run).run.store.local(f"{weights.key}/config.json").parent),
        digest=weights.digest,
        losses=losses_of(manifest),
        pair_accuracy=manifest.metrics.get("heldout_accuracy"),
        pairs=int(manifest.metrics.get("heldout_pairs", 0)),
        seconds=manifest.provenance.seconds["stage"],
    )


def _path(run: RunRef) -> str:
    return str(session_of(run).run.store.local("run.json").parent)


def _plot(run: RunRef, key: str, models: list[TrainedModel]) -> str:
    store, name = session_of(run).run.store, f"report/loss-{key.rpartition('/')[2]}.png"
    store.put(name, loss_curves(f"Run {run.name}: {key}", {model.name: model.losses for model in models}))
    return str(store.local(name))
