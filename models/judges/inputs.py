"""What can be wrong with a judge before anything runs; every fault is one line that names the term. Torch-free."""

import re

from infra.errors import BadInput
from models.config import ArithmeticData, DataConfig
from models.judges.endpoint import EndpointJudge as AskedJudge
from models.judges.questions import fields_of
from models.judges.training import verdict_texts
from models.rewards.config import (
    ChoiceVerdict,
    EndpointJudge,
    JudgeReward,
    LogprobVerdict,
    ScoreVerdict,
    StepsVerdict,
    TrainedJudge,
    VerdictConfig,
)


def check_judge(term: str, reward: JudgeReward, data: DataConfig) -> None:
    """Raise BadInput, naming the term, for what needs no model to be seen."""
    try:
        _check_template(reward)
        _check_verdict(reward.verdict)
        match reward.model:
            case EndpointJudge() as model:
                AskedJudge(model, sampling=reward.sampling, verdict=reward.verdict)
            case TrainedJudge():
                _check_training(reward, data)
            case _:
                pass
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error


def _check_template(reward: JudgeReward) -> None:
    if reward.template is None:
        return
    judges_steps = isinstance(reward.verdict, StepsVerdict)
    shown, other = ("steps", "completion") if judges_steps else ("completion", "steps")
    fields = fields_of(reward.template)
    if shown not in fields:
        raise BadInput(f"its template {reward.template!r:.200} has no {{{shown}}}: every verdict would be the same")
    if other in fields:
        why = "steps are judged by their numbers" if judges_steps else "only a verdict of kind steps fills it in"
        raise BadInput(f"its template {reward.template!r:.200} has {{{other}}}: {why}; use {{{shown}}}")


def _check_verdict(verdict: VerdictConfig) -> None:
    match verdict:
        case ScoreVerdict():
            try:
                groups = re.compile(verdict.pattern).groups
            except re.error as error:
                raise BadInput(f"its pattern {verdict.pattern!r} is not a regular expression: {error}") from error
            if not groups:
                raise BadInput(f"its pattern {verdict.pattern!r}: expected a group around the score, found none")
        case ChoiceVerdict() | LogprobVerdict():
            _check_texts(tuple(verdict.choices) if isinstance(verdict, ChoiceVerdict) else (verdict.yes, verdict.no))


def _check_texts(texts: tuple[str, ...]) -> None:
    if not all(text.strip() for text in texts):
        raise BadInput(f"its verdicts {texts}: expected a text for each, found an empty one")
    alike = {text.strip() if len(text.strip()) == 1 else text.strip().casefold() for text in texts}
    if len(alike) < len(texts):
        raise BadInput(f"its verdicts {texts}: expected different texts, capitals and spaces aside")


def _check_training(reward: JudgeReward, data: DataConfig) -> None:
    verdict_texts(reward.verdict)
    if not isinstance(data, ArithmeticData) and data.answer_column is None:
        raise BadInput("a judge is trained on right and wrong answers: set data.answer_column")
