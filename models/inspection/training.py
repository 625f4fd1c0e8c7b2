"""Checks of the models that a run trains or trains with: the policy, the critic and the teacher, and the memory of the
update ranks."""

from pathlib import Path

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.variants import check_implementation
from rheostat.models.algorithms import advantages
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.attention import check_attention
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import PolicySource
from rheostat.models.config.policy_losses import PolicyLoss
from rheostat.models.config.references import find_reference_rules
from rheostat.models.config.teachers import Teacher, encode_value
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.inspection.images import check_teacher_images
from rheostat.models.inspection.memory import MicrobatchSizes, critic_bytes, frozen_model_bytes, peak_bytes

LOSS, LOSS_NAMED = ("logprobs_N", "old_N"), ("tokens", "config")
"""Names of the parameters that a user-defined policy loss must have: first the positional ones, then the keyword-only
ones."""

_SHOWN = 10
"""Maximum number of a column's values that a message lists."""


def check_algorithm(algorithm: Algorithm, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a function that implements the algorithm cannot be imported or called."""
    advantages.check_algorithm(algorithm)


def check_loss(loss: PolicyLoss, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the function of a user's loss cannot be imported or called. Importing our own takes seconds."""
    if loss.ships_with("models"):
        return
    if loss.uses_forward_process:
        check_implementation(loss, "errors_ND", "old_ND", where=where, named=("advantages_N", "config"))
    else:
        check_implementation(loss, *LOSS, where=where, named=LOSS_NAMED)


def check_policy(policy: PolicySource, facts: InputFacts, where: str) -> CheckResult:
    """Check that the settings of the update and of the rollout fit the policy, and return the policy's sizes."""
    inputs, found = facts.inputs, facts.policy
    shape, new_tokens = found.shape, inputs.rollout.sampling.max_new_tokens
    inputs.update.check_model(shape)
    shape.check_slices(inputs.update.sequence_parallel, what="the policy")
    check_attention(inputs.update.attention, found.outline, shape)
    is_averaged = any(each.ema_decay for each in find_reference_rules(inputs.update, inputs.algorithm).values())
    if is_averaged and policy.copied_model is not None and not (inputs.warmup or inputs.dpo):
        check_averages(fetch_path(policy.copied_model))
    if new_tokens >= shape.context:
        key = f"rollout.sampling.max_new_tokens is {new_tokens}"
        raise BadInput(f"{key}, but the policy's context is {shape.context_text}, so no prompt fits. Lower the key.")
    return CheckResult(facts=found.sizes())


def check_averages(directory: Path) -> None:
    """Raise BadInput if the weights of the initial policy cannot be averaged with those of later policies. torch
    is not imported for a directory of a usual form."""
    from rheostat.models.inspection.plain import read_plain

    if read_plain(directory) is None:
        from rheostat.models.training.moving_average import check_initial_policy

        check_initial_policy(directory)


def check_denoising(denoising: DenoisingConfig, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the policy cannot generate images with these settings, or if a prompt is too long for it."""
    assert facts.image_tokens, "training processes tokens for each image"


def check_memory(update: UpdateConfig, facts: InputFacts, where: str) -> CheckResult:
    """Return the bytes that each rank needs for training the policy, for its reference model and for the largest
    micro-batch, by purpose. Raises BadInput if the configured activation checkpointing is impossible."""
    rollout, algorithm, ranks = facts.inputs.rollout, facts.inputs.algorithm, facts.inputs.pools.update_ranks
    model = facts.policy.outline.guided(1 if rollout.denoising is None else rollout.denoising.guidance)
    if update.activation_checkpointing and not model.recomputes:
        raise BadInput(
            f"update.activation_checkpointing is set, but transformers cannot recompute the layers of {model.kind}. "
            "Remove the key, and lower update.microbatch_tokens to save memory."
        )
    longest = facts.image_tokens or max(facts.longest_tokens, int(facts.numbers.get("longest_chat_tokens", 0)))
    completions = rollout.prompts * rollout.group_size
    sizes = MicrobatchSizes.compute(update, longest=longest, completions=completions, ranks=ranks)
    compared = update.kl_penalty is not None or advantages.required_models(algorithm).reference
    return CheckResult(facts=peak_bytes(update, model, sizes, ranks=ranks, has_reference=compared))


def check_critic(algorithm: Algorithm, facts: InputFacts, where: str) -> CheckResult | None:
    """Check that the critic fits the policy, and return its size. It is trained next to the policy in the same way."""
    from rheostat.models.inspection.other_models import inspect_critic

    if (value_model := algorithm.value_model) is None:
        return None
    update, ranks = facts.inputs.update, facts.inputs.pools.update_ranks
    source = None if value_model.path is None else fetch_path(value_model.path)
    slices, longest = update.sequence_parallel, facts.longest_tokens
    critic = inspect_critic(source, facts.policy, longest_tokens=longest, slices=slices)
    return CheckResult(facts={"critic_parameters": critic.parameters, **critic_bytes(update, critic, ranks=ranks)})


def check_teacher(teacher: Teacher, facts: InputFacts, where: str) -> CheckResult | None:
    """Check that the teacher can score the policy's tokens, and return the size of the largest teacher so far, because
    a rank has only one teacher in memory at a time. Return None for a teacher behind an endpoint, and for one that is
    the policy in memory. The prompts of a policy that is the teacher are checked elsewhere."""
    update, ranks = facts.inputs.update, facts.inputs.pools.update_ranks
    if teacher.privileged is not None:
        model = facts.policy.outline if teacher.privileged.ema_decay else None
    else:
        from rheostat.models.inspection import other_models

        longest, slices = facts.longest_tokens, update.sequence_parallel
        model = other_models.check_teacher(teacher, facts.tokenizer, longest_tokens=longest, slices=slices, where=where)
        check_teacher_images(teacher, facts.problems, facts.processor, limits=facts.inputs.data.pixels, where=where)
    if model is None:
        return None
    sizes = frozen_model_bytes(update, model, name="teacher", ranks=ranks)
    numbers = {"teacher_parameters": model.parameters, **sizes}
    return CheckResult(facts={name: max(size, facts.numbers.get(name, 0.0)) for name, size in numbers.items()})


def check_top_tokens(algorithm: Algorithm, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the loss needs more of the teacher's most probable tokens than the policy's tokenizer has
    tokens."""
    if algorithm.teacher_top_k > len(facts.tokenizer):
        raise BadInput(
            f"algorithm.distillation.top_k.tokens is {algorithm.teacher_top_k}, but the policy's tokenizer has "
            f"{len(facts.tokenizer)} tokens. Lower algorithm.distillation.top_k.tokens."
        )


def check_specialists(algorithm: Algorithm, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a specialist teacher selects no training problem."""
    distillation = algorithm.distillation
    if distillation is None or not distillation.specialists:
        return
    chosen = {distillation.choose_teacher(problem.columns) for problem in facts.train}
    for index, specialist in enumerate(distillation.specialists):
        if index + 1 in chosen:
            continue
        values = {
            encode_value(problem.columns[specialist.column])
            for problem in facts.train
            if specialist.column in problem.columns
        }
        found = f"has the values {', '.join(sorted(values)[:_SHOWN])}" if values else "is in no problem"
        raise BadInput(
            f"algorithm.distillation.specialists[{index}] selects no training problem: it selects "
            f"{specialist.column} = {' or '.join(specialist.values)} unless an earlier specialist does, but the column "
            f"{found}. Correct the values, or list the column in environment_columns of the data."
        )
