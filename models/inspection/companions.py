"""The models beside the policy, checked before anything is loaded: the critic, the teacher, and what serves rewards."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.config.algorithms import TeacherDirectory, TeacherEndpoint
from models.config.judges import (
    ChoiceVerdict,
    DirectoryJudge,
    DirectoryRewardModel,
    JudgeReward,
    LogprobVerdict,
    ModelReward,
    ServedReward,
    TrainedJudge,
)
from models.config.policy import ModelOutline
from models.data.problems import Problem
from models.endpoints.prompt_logprobs import TokenScorer
from models.inspection.decoder import DecoderSizes
from models.inspection.directory import Inspected, inspect_decoder, inspect_directory
from models.judges.prompts import question_about
from models.judges.tokenizer import judge_tokenizer
from models.text.tokenizer import speller


def inspect_critic(source: Path | None, policy: Inspected, *, longest_tokens: int) -> ModelOutline:
    """Refuse a critic that could not value the policy's sequences; without a source it begins as the policy."""
    if source is None:
        return policy.critic()
    from models.modeling.adapters import outline
    from models.modeling.critic import check_critic

    return outline(check_critic(source, policy.tokenizer, longest_tokens=longest_tokens))


def check_teacher(
    teacher: TeacherDirectory | TeacherEndpoint, tokenizer: PreTrainedTokenizerFast, *, longest_tokens: int
) -> int:
    """Refuse a teacher that cannot score the policy's tokens; return its parameters here, none behind an endpoint.

    `longest_tokens` are those of prompt and completion together. Neither weights nor the network are touched.
    """
    if isinstance(teacher, TeacherEndpoint):
        TokenScorer(teacher, spell=speller(tokenizer), on_progress=lambda: None)
        return 0
    try:
        found = inspect_directory(teacher.path)
    except BadInput as error:
        raise BadInput(f"algorithm.distillation.teacher: {error}") from error
    _check_tokens(teacher.path, found.tokenizer, tokenizer)
    if longest_tokens > found.shape.context:
        raise BadInput(
            f"algorithm.distillation.teacher {teacher.path}: its context is {found.shape.context} tokens, expected "
            f"at least {longest_tokens}: the longest prompt and max_new_tokens"
        )
    return found.shape.parameters


def _check_tokens(path: Path, own: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast) -> None:
    """Every token of the policy's must be the same text under the same number; the teacher may know more."""
    theirs = own.get_vocab()
    for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"number {theirs[token]}" if token in theirs else "no such token"
            raise BadInput(
                f"algorithm.distillation.teacher {path}: its tokenizer is not the policy's: expected token {token!r} "
                f"as number {number}, found {found}"
            )
    if own.eos_token_id != policy.eos_token_id:
        raise BadInput(
            f"algorithm.distillation.teacher {path}: it ends with {own.eos_token!r}, expected the policy's "
            f"{policy.eos_token!r}: it would teach never to end"
        )


def check_served_model(term: str, reward: ServedReward, *, problems: Sequence[Problem], seed: int, gpus: float) -> int:
    """Refuse a model that cannot serve the reward, on workers with so many GPUs; return its number of parameters.

    Weights are not read.
    """
    try:
        match reward:
            case ModelReward(model=DirectoryRewardModel(path=path)):
                from models.modeling.reward_model import check_reward_model

                return check_reward_model(path, reward.template)
            case JudgeReward(model=DirectoryJudge(path=path, engine=engine)):
                found = inspect_directory(path)
            case JudgeReward(model=TrainedJudge(shape=judge, engine=engine)):
                tokenizer = judge_tokenizer(judge, reward, problems, seed=seed)
                found = inspect_decoder(DecoderSizes.from_scratch(judge, vocab_size=len(tokenizer)), tokenizer)
            case _:
                raise BadInput(
                    "a model behind an endpoint, or one that begins as the policy, is not made for the reward"
                )
        longest = _check_room(reward, problems, tokenizer=found.tokenizer, context=found.shape.context)
        engine.memory(found.shape, longest=longest, gpus=gpus, name="model.engine")
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error
    return found.shape.parameters


def _check_room(
    reward: JudgeReward, problems: Sequence[Problem], *, tokenizer: PreTrainedTokenizerFast, context: int
) -> int:
    """Refuse a judge that could not even read a question about a right answer; return the tokens of the longest."""
    verdict = reward.verdict
    chooses = isinstance(verdict, LogprobVerdict) or (isinstance(verdict, ChoiceVerdict) and verdict.constrained)
    room = 1 if chooses else reward.sampling.max_new_tokens
    texts = [question_about(p, p.worked or p.answer, reward=reward, seed=0) for p in problems]
    longest = max(len(tokens) for tokens in tokenizer(texts)["input_ids"])
    if longest + room > context:
        raise BadInput(
            f"questions about right answers have up to {longest} tokens and a verdict up to {room}, expected at most "
            f"{context} together: the judge's context"
        )
    return longest + room
