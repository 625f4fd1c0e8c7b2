"""Checks of the critic, teacher, judges and reward models of a run before anything is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target
from rheostat.infra.store.inputs import fetch_path, format_path
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.images import PixelLimits
from rheostat.models.config.judges import (
    ClipModel,
    ClipModelReward,
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    ModelReward,
    PolicyShape,
    ServedReward,
    TrainedJudge,
)
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.process_models import DirectoryProcessModel, ProcessModelReward
from rheostat.models.config.teachers import TEACHER_KEY, Teacher, TeacherDirectory, TeacherEndpoint
from rheostat.models.data.problems import Problem
from rheostat.models.endpoints.prompt_logprobs import TokenScorer
from rheostat.models.inspection.directory import Inspected, inspect_directory, inspect_policy
from rheostat.models.judges.prompts import question_about, vocabulary_texts
from rheostat.models.text.alignment import build_byte_decoder
from rheostat.models.text.tokenizer import build_token_decoder, tokenize_questions
from rheostat.models.vision.families import FAMILIES
from rheostat.models.vision.processor import VisionProcessor


def inspect_critic(source: Path | None, policy: Inspected, *, longest_tokens: int, slices: int) -> ModelOutline:
    """Check that a critic can predict values for the policy's sequences, and return its size and structure. `source` is
    the critic's directory, or None for a critic that starts as a copy of the policy. `slices` is the number of ranks in
    a sequence-parallel group. Raises BadInput if the critic does not fit."""
    if source is None:
        return policy.critic()
    from rheostat.models.modeling.adapters import outline
    from rheostat.models.modeling.critic import check_critic
    from rheostat.models.modeling.policy import policy_shape
    from rheostat.models.modeling.shared_prompts import supports_sequence_parallelism

    model = check_critic(source, policy.tokenizer, longest_tokens=longest_tokens)
    shape = policy_shape(model.config, parameters=0, source=str(source))
    replace(shape, slices=supports_sequence_parallelism(model)).check_slices(slices, what=f"the critic {source}")
    return outline(model)


class TeacherCheck(Protocol):
    """Function that checks one kind of teacher before a run begins. `check_teacher` calls it."""

    def __call__(
        self,
        teacher: Any,  # noqa: ANN401 -- its own
        tokenizer: PreTrainedTokenizerFast,
        /,
        *,
        longest_tokens: int,
        slices: int,
        where: str,
    ) -> ModelOutline | None:
        """Return the size and structure of the teacher that the run's workers load, or None if it is behind an
        endpoint. `slices` is the number of ranks in a sequence-parallel group, and `where` the configuration key of
        the teacher. Raises BadInput if the teacher cannot score the policy's tokens."""
        ...


def check_teacher(
    teacher: Teacher,
    tokenizer: PreTrainedTokenizerFast,
    *,
    longest_tokens: int,
    slices: int = 1,
    where: str = TEACHER_KEY,
) -> ModelOutline | None:
    """Check that a teacher can score the policy's tokens. Return the size and structure of the teacher that the run's
    workers load, or None if it is behind an endpoint. `longest_tokens` is the maximum length of prompt and completion
    together, `slices` the number of ranks in a sequence-parallel group, and `where` the teacher's configuration key.
    Raises BadInput if the teacher does not fit.

    Weights are not read, and no request is sent.
    """
    check = cast(TeacherCheck, find_target(teacher.inspection, where=f"teacher {teacher.label!r}"))
    return check(teacher, tokenizer, longest_tokens=longest_tokens, slices=slices, where=where)


def check_teacher_endpoint(
    teacher: TeacherEndpoint, tokenizer: PreTrainedTokenizerFast, *, longest_tokens: int, slices: int, where: str
) -> None:
    """Check that the configuration allows requests to the teacher's endpoint. Returns None, because workers load no
    teacher."""
    TokenScorer(teacher, spell=build_token_decoder(tokenizer), on_progress=lambda: None)


def check_teacher_directory(
    teacher: TeacherDirectory, tokenizer: PreTrainedTokenizerFast, *, longest_tokens: int, slices: int, where: str
) -> ModelOutline:
    """Check that the teacher's tokenizer and context length fit the policy, and return the teacher's size and
    structure."""
    try:
        inspected = inspect_directory(fetch_path(teacher.path))
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    if teacher.aligns_text:
        build_byte_decoder(inspected.tokenizer, where=f"{where} {format_path(teacher.path)}")
        build_byte_decoder(tokenizer, where=f"{where}.align is 'text': the policy")
        inspected.shape.check_slices(slices, what=f"{where} {format_path(teacher.path)}")
        return inspected.outline
    _check_tokens(f"{where} {format_path(teacher.path)}", inspected.tokenizer, tokenizer)
    if longest_tokens > inspected.shape.context:
        raise BadInput(
            f"{where} {format_path(teacher.path)}: the teacher's context is "
            f"{inspected.shape.context_text}, but the longest prompt plus max_new_tokens need at least "
            f"{longest_tokens} tokens. Use a teacher with a longer context, or lower rollout.sampling.max_new_tokens."
        )
    inspected.shape.check_slices(slices, what=f"{where} {format_path(teacher.path)}")
    return inspected.outline


def _check_tokens(teacher: str, own: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast) -> None:
    """Raise BadInput unless each token of the policy has the same ID in the teacher, and the end tokens are the same.
    The teacher may have additional tokens. `teacher` is its configuration key and path."""
    if (other := _find_differing_token(own, policy)) is not None:
        raise BadInput(
            f"{teacher}: the tokenizer differs from the policy's: {other}. Use a teacher "
            "with the tokenizer of the policy, or set align = 'text' for a teacher of kind 'directory'."
        )
    if own.eos_token_id != policy.eos_token_id:
        raise BadInput(
            f"{teacher}: the EOS token is {own.eos_token!r}, but the policy's is "
            f"{policy.eos_token!r}, so the policy would be trained never to end. Use a teacher with the same EOS token."
        )


def _find_differing_token(tokenizer: PreTrainedTokenizerFast, expected: PreTrainedTokenizerFast) -> str | None:
    """Return a description of the first token of `expected` that is missing in `tokenizer` or has another ID there.
    Return None if there is no such token."""
    theirs = tokenizer.get_vocab()
    for token, number in sorted(expected.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            has = f"id {theirs[token]}" if token in theirs else "no id"
            return f"token {token!r} must have the id {number}, but there it has {has}"
    return None


def check_same_tokens(configured: PolicyConfig, champion: PolicyConfig) -> None:
    """Raise BadInput if the configured policy and the champion have different tokenizers, because a retrain starts from
    the champion (the current policy) instead of the configured policy.

    Nothing is checked if the configured policy's tokenizer is trained on the data, or if its files no longer exist.
    """
    if not configured.brings_tokens:
        return
    try:
        expected = inspect_policy(configured, ()).tokenizer
    except BadInput:
        return
    if (other := _find_differing_token(inspect_policy(champion, ()).tokenizer, expected)) is not None:
        raise BadInput(
            "promotion.registry: the champion of the registry, with which the run starts instead of the configured "
            f"policy, has another tokenizer: {other}. Use a registry whose policies have the tokenizer of the "
            "configured policy."
        )


class ServedModelCheck(Protocol):
    """Function that checks one kind of judge or reward model before it is loaded. `check_served_model` calls it."""

    def __call__(
        self,
        reward: Any,  # noqa: ANN401 -- its own settings, as the model's
        model: Any,  # noqa: ANN401
        /,
        *,
        problems: Sequence[Problem],
        seed: int,
        gpus: float,
    ) -> int:
        """Return the model's number of parameters.

        Raises BadInput if the model cannot compute the reward on workers with `gpus` GPUs.
        """
        ...


def check_served_model(term: str, reward: ServedReward, *, problems: Sequence[Problem], seed: int, gpus: float) -> int:
    """Check that a judge or reward model can compute its reward on workers with `gpus` GPUs, and return its number of
    parameters.

    `term` is the name of the reward in messages. Weights are not read. Raises BadInput if the model does not fit.
    """
    try:
        check = cast(ServedModelCheck, find_target(reward.model.inspection, where=f"model {reward.model.label!r}"))
        return check(reward, reward.model, problems=problems, seed=seed, gpus=gpus)
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error


def check_directory_reward_model(
    reward: ModelReward, model: DirectoryRewardModel, *, problems: Sequence[Problem], seed: int, gpus: float
) -> int:
    """Check the reward model in an external directory, and return its number of parameters. Raises BadInput if the
    model does not fit."""
    from rheostat.models.modeling.reward_model import check_reward_model

    return check_reward_model(fetch_path(model.path), reward.template)


def check_directory_process_model(
    reward: ProcessModelReward, model: DirectoryProcessModel, *, problems: Sequence[Problem], seed: int, gpus: float
) -> int:
    """Check the process reward model in an external directory, and return its number of parameters. Raises BadInput if
    the model does not fit."""
    from rheostat.models.modeling.process_model import check_process_model

    return check_process_model(fetch_path(model.path))


def check_clip_model(
    reward: ClipModelReward, model: ClipModel, *, problems: Sequence[Problem], seed: int, gpus: float
) -> int:
    """Load a CLIP model with its head on the CPU, and return its number of parameters. Raises BadInput if the model
    cannot be loaded or does not fit its image processor."""
    from rheostat.models.rewards.clip import ClipScorer

    return ClipScorer(model).parameters


def check_directory_judge(
    reward: JudgeReward, model: DirectoryJudge, *, problems: Sequence[Problem], seed: int, gpus: float
) -> int:
    """Check the judge in an external directory, and return its number of parameters. Raises BadInput if the judge does
    not fit."""
    return _check_judge(inspect_directory(fetch_path(model.path)), reward, model.engine, problems=problems, gpus=gpus)


def check_trained_judge(
    reward: JudgeReward, model: TrainedJudge, *, problems: Sequence[Problem], seed: int, gpus: float
) -> int:
    """Check the judge that a run would build and train, and return its number of parameters. Raises BadInput if the
    judge does not fit."""
    assert not isinstance(model.shape, PolicyShape), "a judge that starts as the policy is checked with the policy"
    inspected = inspect_policy(model.shape, vocabulary_texts(reward, problems, seed=seed))
    return _check_judge(inspected, reward, model.engine, problems=problems, gpus=gpus)


def check_policy_judge(
    term: str, reward: JudgeReward, policy: Inspected, *, problems: Sequence[Problem], gpus: float
) -> int:
    """Check that a judge can start as a copy of the policy, and return its number of parameters. `term` is the name of
    the reward in messages, and `gpus` the number of GPUs of a worker."""
    assert reward.engine is not None, "a judge that the run trains has an engine in this process"
    try:
        return _check_judge(policy, reward, reward.engine, problems=problems, gpus=gpus)
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error


def _check_judge(
    found: Inspected, reward: JudgeReward, engine: EngineSettings, *, problems: Sequence[Problem], gpus: float
) -> int:
    processor = found.load_processor(PixelLimits())
    if reward.images == "prompt" and processor is None:
        raise BadInput(
            'images = "prompt" is set, but this judge reads only text. Use a judge of the families '
            f"{', '.join(FAMILIES)}, or remove the key."
        )
    longest = _check_room(reward, problems, found=found, processor=processor)
    engine.estimate_memory(found.shape, longest=longest, gpus=gpus, name="model.engine")
    return found.shape.parameters


def _check_room(
    reward: JudgeReward, problems: Sequence[Problem], *, found: Inspected, processor: VisionProcessor | None
) -> int:
    """Return the maximum number of tokens of a judge prompt together with the judge's answer. Raises BadInput if the
    judge's context is too short even for the prompts about the correct answers. `found` describes the judge's model."""
    room = reward.sampling.max_new_tokens if reward.generates_text else 1
    texts = [question_about(p, p.worked or p.answer, reward=reward, seed=0) for p in problems]
    images = [p.images if reward.images == "prompt" else () for p in problems]
    questions = tokenize_questions(
        texts,
        images,
        found.tokenizer,
        chat=reward.model.uses_chat_template,
        processor=processor,
        rules=reward.model.text_rules,
    )
    longest = max(len(question.input) for question in questions)
    if longest + room > found.shape.context:
        raise BadInput(
            f"the longest question to the judge (about a correct answer) has {longest} tokens and its verdict up to "
            f"{room}, but the judge's context is only {found.shape.context} tokens. Use a judge with a longer "
            "context, or shorten the template."
        )
    return longest + room
