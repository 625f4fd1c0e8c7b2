"""Check all inputs of a run before anything is written: `python -m rheostat.models.commands.preflight run`.

`plan` does the same without writing to the cache, and `scoring` checks the rewards alone. Reads the configuration as
JSON on stdin. Prints `{"ok": true, "error": "", "is_down": false, "facts": {…}, "notes": […]}`, or `ok` false with the
error in one line and exit code 2; `is_down` means that an endpoint did not answer. Flows may not import code of models.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from rheostat.infra.config import PoolsConfig
from rheostat.infra.errors import BadInput, EndpointDown, InputErrors
from rheostat.infra.runner import die_with_parent
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.trackers.config import TrackerConfig, check_tracker
from rheostat.infra.variants import check_implementation
from rheostat.models.algorithms.advantages import check_algorithm, required_models
from rheostat.models.commands.memory import MicrobatchSizes, critic_bytes, frozen_model_bytes, peak_bytes
from rheostat.models.commands.preflight_cache import build_key, checks_directory, find_or_compute
from rheostat.models.commands.sizes import check_sizes, count_problems, count_warmup_images
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.attention import check_attention
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.data import DataConfig
from rheostat.models.config.job import slot_engines
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.promotion import SuiteCheck
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.training import DpoConfig, EvaluationConfig, WarmupConfig
from rheostat.models.data.examples import warmup_examples
from rheostat.models.data.problems import Problem, identity, load_problems
from rheostat.models.data.reading import report_reading
from rheostat.models.data.unread_columns import list_column_notes
from rheostat.models.engines.protocol import check_implemented
from rheostat.models.gate.contamination import contamination
from rheostat.models.inspection import images
from rheostat.models.judges.checks import check_judge
from rheostat.models.modeling.unread_weights import collect_unread_weights
from rheostat.models.rewards.code import check_code, read_tests
from rheostat.models.rewards.evaluate import check_rewards, reference_checks
from rheostat.models.vision.processor import VisionProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rheostat.models.inspection.directory import Inspected


LOSS, LOSS_NAMED = ("logprobs_N", "old_N"), ("tokens", "config")
"""Names of the parameters that a user-defined policy loss must have: first the positional ones, then the keyword-only
ones."""


class Inputs(BaseModel):
    """Parts of a run's configuration that the preflight check reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seed: int
    data: DataConfig
    policy: PolicyConfig
    warmup: WarmupConfig | None
    preferences: PreferencesConfig | None
    dpo: DpoConfig | None
    rollout: RolloutConfig
    scoring: ScoringConfig
    algorithm: AlgorithmConfig
    update: UpdateConfig
    pools: PoolsConfig
    evaluation: EvaluationConfig
    checked: SuiteCheck | None = None
    """Training data and policy with which the problems of a retrain's evaluation suite are compared, or None for other
    runs."""
    tracking: tuple[TrackerConfig, ...] = ()
    giving_way: tuple[str, ...] = ()
    """Configuration keys that the user did not set. If there are too few problems, the defaults of these keys are
    lowered instead of failing."""


def check(inputs: Inputs, *, cache: Path | None = None) -> CheckResult:
    """Check all inputs of a run. Return counts, lengths, and memory estimates in bytes per worker. With `cache`, facts
    about models from an earlier check are reused. Raises BadInput if an input is invalid."""
    for tracker in inputs.tracking:
        check_tracker(tracker)
    _check_rewards(inputs)
    check_algorithm(inputs.algorithm)
    check_implementation(inputs.data, "data", "split", "seed", where="data")
    train = load_problems(inputs.data, "train", inputs.seed)
    heldout = load_problems(inputs.data, "heldout", inputs.seed)
    reading = report_reading(inputs.data, "train", "heldout")
    counts = count_problems(inputs.data, train, heldout)
    counts |= {f"dropped/{reason}": number for reason, number in reading.dropped.items()}
    _check_sizes(inputs, counts)
    _check_data(inputs, train, heldout)
    if inputs.warmup is not None and inputs.policy.picture_side is not None:
        counts |= count_warmup_images(inputs.data, inputs.warmup, inputs.seed, side=inputs.policy.picture_side)
    images.check_reward_images(inputs.scoring, [*train, *heldout], generates_images=inputs.policy.generates_images)
    if inputs.checked is not None:
        _check_suite(inputs, inputs.checked, heldout)

    def find() -> CheckResult:
        with collect_unread_weights() as notes:
            facts = _check_policy(inputs, train, heldout, notes)
            facts |= {**_check_served(inputs, train), **_check_user(inputs, [*train, *heldout])}
        return CheckResult(facts=facts, notes=tuple(notes))

    if cache is None or not _is_repeatable(inputs):
        result = find()
    else:
        image_digests = [problem.digests for problem in (*train, *heldout)]
        result = find_or_compute(cache, lambda: build_key(inputs, train, heldout, image_digests), find)
    images.check_judge_images(inputs.scoring)  # not cached, because another model may answer there by now
    _check_sizes(inputs, facts := counts | result.facts)
    _check_environments(inputs.rollout, inputs)  # last, so that nobody installs vLLM for a model that it cannot serve
    return CheckResult(facts=facts, notes=(*reading.notes, *result.notes))


def _is_repeatable(inputs: Inputs) -> bool:
    """Return whether the result of a check may be cached, because no environment, simulated user's class or teacher
    endpoint affects it."""
    engines = (engine for _, engine, _ in slot_engines(inputs.rollout, inputs.scoring))
    distillation = inputs.algorithm.distillation
    asks = distillation is not None and distillation.teacher.endpoint is not None
    return (
        not asks
        and inputs.rollout.environment is None
        and all(part.ships_with("models") for part in (inputs.algorithm, inputs.update.loss, *engines))
    )


def check_scoring(inputs: Inputs) -> CheckResult:
    """Check only the reward settings, before stored rollouts are scored again. The data is read only if workers host a
    model that computes a reward."""
    _check_rewards(inputs)
    _check_environments(None, inputs)
    hosted = bool(inputs.scoring.hosted_rewards)
    facts = _check_served(inputs, load_problems(inputs.data, "train", inputs.seed)) if hosted else {}
    images.check_judge_images(inputs.scoring)
    return CheckResult(facts=facts)


def _check_environments(rollout: RolloutConfig | None, inputs: Inputs) -> None:
    """Check that the libraries of the rollout engines are installed on this machine. On a remote cluster, the workers
    check this instead."""
    if inputs.pools.ray_address is None:
        for name, engine, slots in slot_engines(rollout, inputs.scoring):
            engine.check_environment(name, gpus=slots * inputs.pools.gpus_per_worker)


def _check_rewards(inputs: Inputs) -> None:
    check_rewards(inputs.scoring)
    check_code(inputs.scoring)
    for term, served in inputs.scoring.model_rewards.items():
        if served.kind == "judge":
            check_judge(term, served, inputs.data)


def _check_sizes(inputs: Inputs, counts: Mapping[str, float]) -> None:
    """Raise BadInput if there are not enough problems for one iteration or for an evaluation."""
    prompts, evaluated = inputs.rollout.prompts, inputs.evaluation.problems
    check_sizes(inputs.data, counts, prompts=prompts, evaluated=evaluated, giving_way=inputs.giving_way)


def _check_data(inputs: Inputs, train: list[Problem], heldout: list[Problem]) -> None:
    """Check the training and held-out problems, the warm-up examples and the reference answers. Raises BadInput that
    lists all faults."""
    training_problems, input_errors = {problem.identity for problem in train}, InputErrors()
    for problem in heldout:
        with input_errors.collect(problem.source):
            if problem.identity in training_problems:
                raise BadInput(
                    f"{problem.source}: this held-out problem is also a training problem. Remove it from one split."
                )
    input_errors.check()
    if inputs.warmup is not None and inputs.warmup.chats is None and inputs.policy.picture_side is None:
        warmup_examples(inputs.data, inputs.warmup.model_copy(update={"steps": 1}), inputs.seed)
    with reference_checks(inputs.scoring) as checks:
        checks += [(reward.label, read_tests) for reward in inputs.scoring.code_rewards.values()]
        for problem in (*train, *heldout):
            with input_errors.collect(problem.source):
                for name, check_reference in checks:
                    try:
                        check_reference(problem.answer)
                    except ValueError as error:
                        raise BadInput(
                            f"{problem.source}: reward {name!r} cannot use the reference answer: {error}"
                        ) from error
    input_errors.check()


def _check_suite(inputs: Inputs, against: SuiteCheck, heldout: list[Problem]) -> None:
    """Raise BadInput if a retrain would train on problems of its evaluation suite, or if the champion (the policy from
    which it starts) has another tokenizer than the configured policy."""
    from rheostat.models.inspection.other_models import check_same_tokens

    texts = {problem.source: problem.identity for problem in heldout[: inputs.evaluation.problems]}
    overlap = contamination(texts, (problem.identity for problem in load_problems(against.data, "train", inputs.seed)))
    if overlap.share > against.max_contaminated:
        cap = f"{overlap.share:.1%} is above promotion.max_contaminated {against.max_contaminated:.1%}"
        raise BadInput(f"suite {against.suite!r}: {overlap.text()}; {cap}")
    if against.policy is not None:
        check_same_tokens(against.policy, inputs.policy)


def _check_policy(inputs: Inputs, train: list[Problem], heldout: list[Problem], notes: list[str]) -> dict[str, float]:
    """Check all that depends on the policy's files. Return sizes and memory, and append remarks to `notes`."""
    # Imported here, so errors in rewards and data appear before the second that importing transformers takes.
    from rheostat.models.commands.preferences import check_preferences
    from rheostat.models.environments.runtime import check_turns, tools_of
    from rheostat.models.inspection.chats import check_chats
    from rheostat.models.inspection.directory import inspect_policy
    from rheostat.models.inspection.texts import list_text_notes
    from rheostat.models.text.tokenizer import enforce_prompt_length, problem_texts, tokenize_problems

    for name, engine, _ in slot_engines(inputs.rollout, inputs.scoring):
        check_implemented(engine, name=name)
    if not inputs.update.loss.ships_with("models"):  # importing our losses takes seconds
        check_implementation(inputs.update.loss, *LOSS, where="update.loss", named=LOSS_NAMED)
    policy = inspect_policy(inputs.policy, problem_texts(train))
    shape, tokenizer = policy.shape, policy.tokenizer
    inputs.update.check_model(shape)
    inputs.rollout.engine.check_policy(shape, "rollout.engine")
    shape.check_slices(inputs.update.sequence_parallel, what="the policy")
    check_attention(inputs.update.attention, policy.outline, shape)
    problems, processor, rules = [*train, *heldout], policy.load_processor(inputs.data.pixels), inputs.data.text_rules
    texts, denoising = [(each.source, identity(each.prompt)) for each in problems], inputs.rollout.denoising
    image_tokens = 0 if denoising is None else policy.check_drawing(denoising, texts)
    images.check_images(problems, processor, allows_missing=inputs.data.image_version == 1)
    environment = inputs.rollout.environment
    tools = tools_of(environment, problems)
    prompts = tokenize_problems(problems, tokenizer, processor, tools=tools, rules=rules)
    if environment is not None:
        check_turns(environment, tokenizer, tools, problems[0])
    new_tokens = inputs.rollout.sampling.max_new_tokens
    if new_tokens >= shape.context:
        key = f"rollout.sampling.max_new_tokens is {new_tokens}"
        raise BadInput(f"{key}, but the policy's context is {shape.context_text}, so no prompt fits. Lower the key.")
    pairs, room, too_long = [*zip(problems, prompts, strict=True)], shape.context - new_tokens, inputs.data.long_prompts
    train_asked = enforce_prompt_length(pairs[: len(train)], max_tokens=room, too_long=too_long, split="train")
    heldout_asked = enforce_prompt_length(pairs[len(train) :], max_tokens=room, too_long=too_long, split="heldout")
    longest = max(len(prompt.input) for _, prompt in (*train_asked, *heldout_asked))
    chats = check_chats(inputs.warmup, policy, inputs.data, heldout, notes)
    longest_chat = int(chats.get("longest_chat_tokens", 0))
    imitates = inputs.warmup is not None and inputs.warmup.chats is None and inputs.policy.picture_side is None
    examples = train if imitates else []
    notes += list_text_notes(problems, tokenizer, rules=rules, processor=processor, examples=examples)
    notes += dict.fromkeys(list_column_notes(inputs.data, problems))
    return {
        **count_problems(inputs.data, [each for each, _ in train_asked], [each for each, _ in heldout_asked]),
        "too_long": len(problems) - len(train_asked) - len(heldout_asked),
        **({"worked_answers": sum(each.worked is not None for each in examples)} if examples else {}),
        **policy.sizes(),
        "mean_prompt_tokens": fmean(len(prompt.input) for _, prompt in train_asked),
        "longest_prompt_tokens": longest,
        **inputs.rollout.engine.estimate_memory(
            shape, longest=longest + new_tokens, gpus=inputs.pools.gpus_per_worker, name="rollout.engine"
        ),
        **_update_memory(
            inputs, policy.outline, longest_tokens=image_tokens or max(longest + new_tokens, longest_chat)
        ),
        **_check_critic(inputs, policy, longest_tokens=longest + new_tokens),
        **_check_teacher(inputs, problems, tokenizer, processor, longest_tokens=longest + new_tokens),
        **chats,
        **check_preferences(inputs, tokenizer, heldout, notes, shape=shape),
        **_check_policy_judges(inputs, policy, train),
    }


def _update_memory(inputs: Inputs, model: ModelOutline, *, longest_tokens: int) -> dict[str, float]:
    """Return the bytes that each rank needs for training the policy, for its reference model and for the largest
    micro-batch, by purpose."""
    update, ranks = inputs.update, inputs.pools.update_ranks
    model = model.guided(1 if inputs.rollout.denoising is None else inputs.rollout.denoising.guidance)
    if update.activation_checkpointing and not model.recomputes:
        raise BadInput(
            f"update.activation_checkpointing is set, but transformers cannot recompute the layers of {model.kind}. "
            "Remove the key, and lower update.microbatch_tokens to save memory."
        )
    compared = update.kl_penalty is not None or required_models(inputs.algorithm).reference
    completions = inputs.rollout.prompts * inputs.rollout.group_size
    sizes = MicrobatchSizes.compute(update, longest=longest_tokens, completions=completions, ranks=ranks)
    return peak_bytes(update, model, sizes, ranks=ranks, has_reference=compared)


def _check_critic(inputs: Inputs, policy: "Inspected", *, longest_tokens: int) -> dict[str, float]:
    """Check that the critic fits the policy, and return its size. It is trained next to the policy in the same way."""
    from rheostat.models.inspection.other_models import inspect_critic

    value_model = inputs.algorithm.value_model
    if value_model is None:
        return {}
    ranks, slices = inputs.pools.update_ranks, inputs.update.sequence_parallel
    source = None if value_model.path is None else fetch_path(value_model.path)
    critic = inspect_critic(source, policy, longest_tokens=longest_tokens, slices=slices)
    return {"critic_parameters": critic.parameters, **critic_bytes(inputs.update, critic, ranks=ranks)}


def _check_teacher(
    inputs: Inputs,
    problems: list[Problem],
    tokenizer: "PreTrainedTokenizerFast",
    processor: VisionProcessor | None,
    *,
    longest_tokens: int,
) -> dict[str, float]:
    """Check that the teacher can score the policy's tokens, and return its size."""
    from rheostat.models.inspection.other_models import check_teacher

    distillation = inputs.algorithm.distillation
    if distillation is None:
        return {}
    teacher, slices = distillation.teacher, inputs.update.sequence_parallel
    model = check_teacher(teacher, tokenizer, longest_tokens=longest_tokens, slices=slices)
    images.check_teacher_images(teacher, problems, processor, limits=inputs.data.pixels)
    if model is None:
        return {}
    sizes = frozen_model_bytes(inputs.update, model, name="teacher", ranks=inputs.pools.update_ranks)
    return {"teacher_parameters": model.parameters, **sizes}


def _check_served(inputs: Inputs, train: list[Problem]) -> dict[str, float]:
    """Check the judges and reward models, except those that start as copies of the policy, and return their sizes."""
    from rheostat.models.inspection.other_models import check_served_model

    return {
        f"{term}_parameters": check_served_model(
            term, reward, problems=train, seed=inputs.seed, gpus=reward.slots * inputs.pools.gpus_per_worker
        )
        for term, reward in inputs.scoring.hosted_rewards.items()
        if not reward.model.begins_as_policy
    }


def _check_policy_judges(inputs: Inputs, policy: "Inspected", train: list[Problem]) -> dict[str, float]:
    """Check that the policy can serve as a judge, if a judge starts as a copy of the policy. Return the judges'
    sizes."""
    from rheostat.models.inspection.other_models import check_policy_judge

    return {
        f"{term}_parameters": check_policy_judge(
            term, reward, policy, problems=train, gpus=reward.slots * inputs.pools.gpus_per_worker
        )
        for term, reward in inputs.scoring.hosted_rewards.items()
        if reward.kind == "judge" and reward.model.begins_as_policy
    }


def _check_user(inputs: Inputs, problems: list[Problem]) -> dict[str, float]:
    if (environment := inputs.rollout.environment) is None or environment.dialogue is None:
        return {}
    from rheostat.models.inspection.users import check_user

    return {"user_parameters": check_user(environment.dialogue, problems=problems, gpus=inputs.pools.gpus_per_worker)}


def main() -> int:
    """Run the preflight command: read a configuration from stdin and write a line with the result to stdout. Returns
    the exit code."""
    die_with_parent(os.getppid())
    answer = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # rewards and libraries may print; stdout must contain only the answer
        inputs = Inputs.model_validate_json(sys.stdin.read())
        error, is_down, result = "", False, CheckResult(facts={})
        try:
            match sys.argv[1:]:
                case ["scoring"]:
                    result = check_scoring(inputs)
                case ["plan"]:  # writes nothing at all
                    result = check(inputs, cache=None)
                case _:
                    result = check(inputs, cache=checks_directory())
        except (BadInput, EndpointDown) as found:
            error, is_down = " ".join(str(found).split()), isinstance(found, EndpointDown)
    with answer:
        verdict = {"ok": not error, "error": error, "is_down": is_down, **result.model_dump()}
        answer.write(json.dumps(verdict) + "\n")
    return 2 if error else 0


if __name__ == "__main__":
    sys.exit(main())
