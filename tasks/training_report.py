"""Results of training on data (SFT, DPO, reward models) for users: losses, held-out data and held-out accuracy."""

from rheostat.infra.config import Settings
from rheostat.infra.counts import format_count
from rheostat.infra.store.manifests import Manifest
from rheostat.models.records.versions import directory_of
from rheostat.tasks.preparation import losses_of
from rheostat.tasks.reporting import locate_run
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import stage
from rheostat.tasks.views.metrics import Accuracy
from rheostat.tasks.views.plots import loss_curves


class TrainedModel(Settings):
    """Model that a run trained on data with SFT, DPO or pairs of completions, and how well the training went."""

    name: str
    """Name of the model: `policy`, or the reward term that it scores."""
    path: str
    """Directory of the model, in Hugging Face format."""
    digest: str
    """Digest of the model's weights."""
    losses: list[float]
    """Training loss at a few points, from the first step to the last."""
    pair_accuracy: float | None
    """Fraction of held-out pairs in which the model prefers the better completion, or None if it was not trained on
    pairs."""
    pairs: int
    """Number of held-out pairs."""
    compared: str = "pair"
    """Singular noun for one item of `pairs`: a pair, or a completion if single completions have labels."""
    step_accuracy: float | None = None
    """Fraction of held-out steps whose label the model predicts, or None if it was not trained on step labels."""
    steps: int = 0
    """Number of held-out steps with a label."""
    heldout_loss_first: float | None = None
    """Mean loss on held-out chats before the training, or None if it was not trained on chats."""
    heldout_loss: float | None = None
    """Mean loss on held-out chats after the training."""
    heldout_chats: int = 0
    """Number of held-out chats."""
    seconds: float
    """Duration of the training in seconds."""

    def line(self) -> str:
        """Describe the losses, the duration and the accuracy on pairs in one line for the terminal."""
        pairs = (
            ""
            if self.pair_accuracy is None
            else f", accuracy {self.pair_accuracy:.3f} on {format_count(self.pairs, f'held-out {self.compared}')}"
        )
        steps = ""
        if self.step_accuracy is not None:
            steps = f", accuracy {self.step_accuracy:.3f} on {format_count(self.steps, 'held-out step')}"
        chats = ""
        if self.heldout_loss is not None and self.heldout_loss_first is not None:
            losses = f"{self.heldout_loss_first:.3f} to {self.heldout_loss:.3f}"
            chats = f", loss {losses} on {format_count(self.heldout_chats, 'held-out chat')}"
        heldout = f"{pairs}{steps}{chats}"
        return f"{self.name}: loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {self.seconds:.0f} s{heldout}"


class TrainedPolicy(Settings):
    """Result of `rheostat sft` or `rheostat dpo`: the trained policy, and its accuracy before and after."""

    run: str
    """Name of the run."""
    path: str
    """Directory or address of the run in the store."""
    policy: TrainedModel
    """Final policy, with its directory, its losses and the duration of the training."""
    before: Accuracy | None
    """Held-out accuracy before the training, or None if no reward decides which answers are correct."""
    after: Accuracy | None
    """Held-out accuracy after the training."""
    plot: str
    """Location of the PNG with the loss curve."""

    def text(self) -> str:
        """Describe losses, accuracies and locations of the result, as lines for the terminal."""
        lines = [self.policy.line()]
        if self.before is not None and self.after is not None:
            lines += [f"held-out accuracy before {self.before.line()}", f"                  after  {self.after.line()}"]
        lines += [f"plot     {self.plot}", f"run      {self.path}", f"policy   {self.policy.path}"]
        return "\n".join((*lines, f"digest   {self.policy.digest}"))


class TrainedRewards(Settings):
    """Result of `rheostat reward-model`: all reward models that a run trained."""

    run: str
    """Name of the run."""
    path: str
    """Directory or address of the run in the store."""
    models: tuple[TrainedModel, ...]
    """Reward models, one for each trained reward."""
    plot: str
    """Location of the PNG with the loss curves."""

    def text(self) -> str:
        """Describe losses, accuracy and directory of each reward model, as lines for the terminal."""
        lines = [f"{model.line()}\n         {model.path}" for model in self.models]
        return "\n".join((*lines, f"plot     {self.plot}", f"run      {self.path}"))


@stage("report on {key}")
async def report_policy(open_run: OpenRun, key: str, before: Accuracy | None, after: Accuracy | None) -> TrainedPolicy:
    """Return the result of training a policy with SFT or DPO. `key` names the stored result. A plot of the loss is
    stored in the run."""
    policy = _describe_model(open_run, "policy", open_run.run.require(key))
    plot = _draw_losses(open_run, key, [policy])
    return TrainedPolicy(
        run=open_run.run.name, path=locate_run(open_run), policy=policy, before=before, after=after, plot=plot
    )


@stage("report on reward models")
async def report_rewards(open_run: OpenRun) -> TrainedRewards:
    """Return the results of training reward models. A plot of their losses is stored in the run."""
    trained = [
        _describe_model(open_run, term, open_run.reward_model(term))
        for term, reward in open_run.settings.scoring.hosted_rewards.items()
        if reward.is_trained
    ]
    plot = _draw_losses(open_run, "rewards", trained)
    return TrainedRewards(run=open_run.run.name, path=locate_run(open_run), models=tuple(trained), plot=plot)


def _describe_model(open_run: OpenRun, name: str, manifest: Manifest) -> TrainedModel:
    weights, has_chats = manifest.bundles["weights"], "heldout_chats" in manifest.metrics
    accuracy, has_labels = manifest.metrics.get("heldout_accuracy"), "heldout_labels" in manifest.metrics
    preferences = open_run.settings.preferences
    return TrainedModel(
        name=name,
        path=directory_of(open_run.run, weights),
        digest=weights.digest,
        losses=losses_of(manifest),
        pair_accuracy=None if has_labels else accuracy,
        pairs=int(manifest.metrics.get("heldout_pairs", 0)),
        compared="pair" if preferences is None else preferences.noun,
        step_accuracy=accuracy if has_labels else None,
        steps=int(manifest.metrics.get("heldout_labels", 0)),
        heldout_loss_first=manifest.metrics.get("heldout_loss_first") if has_chats else None,
        heldout_loss=manifest.metrics.get("heldout_loss") if has_chats else None,
        heldout_chats=int(manifest.metrics.get("heldout_chats", 0)),
        seconds=manifest.provenance.seconds["stage"],
    )


def _draw_losses(open_run: OpenRun, key: str, models: list[TrainedModel]) -> str:
    store, name = open_run.run.store, f"report/loss-{key.rpartition('/')[2]}.png"
    store.put(name, loss_curves(f"Run {open_run.run.name}: {key}", {model.name: model.losses for model in models}))
    return store.locate(name)
