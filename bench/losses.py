"""Cost of each policy loss and correction in an update, relative to PPO's clipped loss with the default correction.

Also the cost of a large head, depending on when its gradient is computed. One trainer and one set of samples serve all
variants, which take turns in an order that changes with each round. The learning rate is 0. Times are CPU times on one
thread, which other processes hardly affect.
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.tables import Table
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.corrections import MaskedImportance, NoCorrection, TruncatedImportance
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.policy_losses import Cispo, Gspo, PolicyGradient, PpoClip
from rheostat.models.modeling.head import LogprobHead
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from rheostat.models.training.ranks import Ranks, join_ranks
from rheostat.models.training.samples import open_samples
from rheostat.models.training.step_plans import StepBatches, plan_policy_steps
from rheostat.models.training.trainer import Trainer
from rheostat.models.training.update_steps import compute_extra_logprobs, take_steps
from tests.support.loopback import free_port
from tests.support.training import publish_scratch, write_samples

ROUNDS = 15
PROMPTS, GROUP = 48, 8
LIMIT = 1.10
"""Maximum expected ratio of the update time with any policy loss to that with PPO's clipped loss.

Losses with a KL penalty may exceed it.
"""
BASE = UpdateConfig(learning_rate=0.0, minibatches=4, microbatch_tokens=2048)
VARIANTS: dict[str, dict[str, object]] = {
    "ppo_clip": {"loss": PpoClip()},
    "ppo_clip, dual clip": {"loss": PpoClip(dual_clip=3.0)},
    "gspo": {"loss": Gspo()},
    "cispo": {"loss": Cispo()},
    "policy_gradient": {"loss": PolicyGradient()},
    "ppo_clip, masked": {"correction": MaskedImportance()},
    "ppo_clip, stale tokens masked": {"stale_correction": MaskedImportance(), "max_staleness": 2},
    "gspo, stale tokens masked": {"loss": Gspo(), "stale_correction": MaskedImportance(), "max_staleness": 2},
    "ppo_clip, uncorrected": {"correction": NoCorrection()},
    "ppo_clip, truncated, KL k3": {"correction": TruncatedImportance(), "kl": KlPenalty()},
}
"""Changes to the update configuration for each measured variant, by name. Times are compared with the first variant."""
HEAD_ROUNDS = 5
HEADS = {
    "trained head, loss per completion: logits computed twice": (True, False),
    "trained head, loss per token: gradient in the forward pass": (True, True),
    "frozen head: gradient in the forward pass": (False, False),
}
"""Two flags per variant of the output head, by name. The first is whether the head is trained.

The second is whether the loss gradient of each token is known during the forward pass.
"""
NOTES = (
    "seconds: median CPU seconds of log-probs before the update and all steps; ratio: median over rounds",
    f"expected: at most {LIMIT:.2f} for every loss, except with a KL penalty, which runs a second model",
    "uncorrected updates need no log-probs of the policy before the update",
)


def measure() -> list[Table]:
    """Measure the CPU seconds of an update with each policy loss and correction.

    Returns a table for each of two small models, because overheads are most visible in the smallest one, and a table of
    the cost of a large output head.
    """
    torch.set_num_threads(1)
    ranks = join_ranks(0, 1, address="127.0.0.1", port=free_port())
    policies = {"tiny model": ScratchPolicy(), "4 layers of width 128": ScratchPolicy(hidden_size=128, layers=4)}
    return [*(_table(name, policy, ranks) for name, policy in policies.items()), _heads()]


def _heads() -> Table:
    """Measure the CPU seconds of a forward and backward pass through an output head of 32,000 tokens, by variant.

    The variants take turns.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 8, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=False))
    head = LogprobHead(model, temperature=1.0, banned=(), chunk_elements=1 << 25)
    states_NH, gradients_N = torch.randn(2048, 512, generator=generator), torch.randn(2048, generator=generator)
    targets_N = torch.randint(32_000, (2048,), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in HEADS}
    for turn in range(-1, HEAD_ROUNDS):
        for name, (trained, in_forward) in HEADS.items():
            head.weight.requires_grad_(trained)
            began = time.process_time()
            logprobs_N = head(
                states_NH.requires_grad_(), targets_N, (lambda _, places: gradients_N[places]) if in_forward else None
            )
            (logprobs_N * gradients_N).sum().backward()
            if turn >= 0:
                seconds[name].append(time.process_time() - began)
    first, *_ = seconds.values()
    rows = tuple(
        (
            name,
            statistics.median(durations),
            statistics.median(one / base for one, base in zip(durations, first, strict=True)),
        )
        for name, durations in seconds.items()
    )
    return Table("Head of 32,000 x 512, 2,048 tokens", ("way", "seconds", "ratio"), rows, NOTES[:1])


def _table(name: str, policy: ScratchPolicy, ranks: Ranks) -> Table:
    with tempfile.TemporaryDirectory() as directory:
        seconds = _seconds(directory, publish_scratch(directory, Path(directory, "scratch"), policy=policy), ranks)
    first, *_ = seconds.values()
    rows = tuple(
        (
            variant,
            statistics.median(durations),
            statistics.median(one / base for one, base in zip(durations, first, strict=True)),
        )
        for variant, durations in seconds.items()
    )
    return Table(f"Losses, {name}, {PROMPTS * GROUP} samples", ("loss and correction", "seconds", "ratio"), rows, NOTES)


def _seconds(store_uri: str, policy: ModelVersion, ranks: Ranks) -> dict[str, list[float]]:
    """Return the CPU seconds of one update in every round, by the name of the variant in `VARIANTS`."""
    store = open_store(store_uri)
    shard = write_samples(store_uri, prompts=PROMPTS, group=GROUP, stalest=3)
    samples = open_samples(store, (shard,))
    work = UpdateWork(
        iteration=0, policy=policy, reference=policy, samples=(shard,), total_iterations=1, seed=0, kl_coefficient=1e-3
    )
    trainer, reference = (_model(fetch_bundle(store, policy.weights)) for _ in range(2))
    trained = Trainer(trainer, BASE, ranks=ranks)
    configs = {name: BASE.model_copy(update=changes) for name, changes in VARIANTS.items()}
    steps = {
        name: plan_policy_steps(samples, work, config=config, ranks=ranks, images=None)
        for name, config in configs.items()
    }
    durations: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(-1, ROUNDS):  # the first round is a warm-up
        for name in random.Random(turn).sample(list(VARIANTS), len(VARIANTS)):
            began = time.process_time()
            _update(trained, reference, steps[name], config=configs[name], ranks=ranks)
            if turn >= 0:
                durations[name].append(time.process_time() - began)
        sys.stderr.write(f"    round {turn + 1} of {ROUNDS}\n")
    trained.close()
    return durations


def _update(
    trainer: Trainer, reference: TokenLogprobs, steps: list[StepBatches], *, config: UpdateConfig, ranks: Ranks
) -> None:
    reference_model = reference if isinstance(config.kl, KlPenalty) else None
    extras = compute_extra_logprobs(
        trainer, steps, config=config, ranks=ranks, reference=reference_model, on_progress=_nothing
    )
    take_steps(trainer, steps, extras, config=config, kl_coefficient=1e-3, ranks=ranks, on_progress=_nothing)


def _model(directory: Path) -> TokenLogprobs:
    return TokenLogprobs(load_policy(directory), temperature=1.0)


def _nothing() -> None:
    pass
