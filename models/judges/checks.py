"""Checks of a judge's settings before a run, and alarms if its verdicts become unreliable. Does not import torch.

The alarms are pure functions of the metrics of an iteration.
"""

import re
from collections.abc import Mapping, Sequence

from rheostat.infra.errors import BadInput, Quarantined
from rheostat.models.config.data import DataConfig
from rheostat.models.config.judges import JudgeReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, ScoreVerdict, StepsVerdict, VerdictConfig
from rheostat.models.judges.endpoint import ChatJudge as AskedJudge
from rheostat.models.judges.prompts import find_fields, verdict_texts


def check_judge(term: str, reward: JudgeReward, data: DataConfig) -> None:
    """Raise BadInput if the settings of a judge are invalid. `term` is the name of the reward term for the message. The
    judge's model is not loaded."""
    try:
        _check_template(reward)
        _check_verdict(reward.answer_verdict)
        if reward.uses_rubric and not data.has_rubrics:
            raise BadInput(
                "verdict.kind = 'rubric' needs the rubric of each problem. Set data.rubric_column to the column with "
                "the criteria."
            )
        if reward.endpoint is not None:
            AskedJudge(reward.endpoint, sampling=reward.sampling, verdict=reward.answer_verdict)
        if reward.is_trained:
            _check_training(reward, data)
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error


def _check_template(reward: JudgeReward) -> None:
    """Raise BadInput if the judge's prompt template lacks the field of the completion or its steps, or has a field that
    is never filled in."""
    if reward.template is None:
        return
    if reward.uses_rubric and "{criterion}" not in reward.template:
        raise BadInput(
            f"the template {reward.template!r:.200} does not contain {{criterion}}, so all criteria of a rubric would "
            "get the same question. Add {criterion} to the template."
        )
    judges_steps = isinstance(reward.verdict, StepsVerdict)
    required, unused = ("steps", "completion") if judges_steps else ("completion", "steps")
    fields = find_fields(reward.template)
    if required not in fields:
        raise BadInput(
            f"the template {reward.template!r:.200} does not contain {{{required}}}, so all verdicts would be the "
            f"same. Add {{{required}}} to the template."
        )
    if unused in fields:
        why = (
            "a judge with verdict.kind 'steps' reads numbered steps"
            if judges_steps
            else "only a judge with verdict.kind 'steps' reads steps"
        )
        raise BadInput(
            f"the template {reward.template!r:.200} contains {{{unused}}}, but {why}. Use {{{required}}} in the "
            "template instead."
        )


def _check_verdict(verdict: VerdictConfig) -> None:
    """Raise BadInput if the pattern or the choices of the judge's verdict are invalid."""
    match verdict:
        case ScoreVerdict():
            try:
                groups = re.compile(verdict.pattern).groups
            except re.error as error:
                raise BadInput(
                    f"verdict.pattern is {verdict.pattern!r}, which is not a valid regular expression: {error}"
                ) from error
            if not groups:
                raise BadInput(
                    f"verdict.pattern is {verdict.pattern!r}, which has no group. Put parentheses around the part "
                    "that matches the score."
                )
        case ChoiceVerdict() | LogprobVerdict():
            _check_texts(tuple(verdict.choices) if isinstance(verdict, ChoiceVerdict) else (verdict.yes, verdict.no))


def _check_texts(texts: tuple[str, ...]) -> None:
    """Raise BadInput if two texts of a verdict are equal apart from case and spaces, or if one is empty."""
    if not all(text.strip() for text in texts):
        raise BadInput(f"the texts of the verdicts are {texts}, but none may be empty. Give every verdict a text.")
    alike = {text.strip() if len(text.strip()) == 1 else text.strip().casefold() for text in texts}
    if len(alike) < len(texts):
        raise BadInput(
            f"the texts of the verdicts are {texts}, but they must differ, ignoring case and surrounding spaces. "
            "Change one of them"
        )


def _check_training(reward: JudgeReward, data: DataConfig) -> None:
    """Raise BadInput if a trained judge cannot be trained with this kind of verdict, or from this data."""
    verdict_texts(reward.verdict)
    if not data.has_answers:
        raise BadInput(
            "a judge with a trained model is trained on correct and wrong answers, but the data has no reference "
            "answers. Set data.answer_column."
        )


def check_judges(
    scoring: ScoringConfig, verdicts: Mapping[str, Sequence[Mapping[str, float]]], *, iteration: int
) -> None:
    """Check the quality of all judges' verdicts in an iteration. `verdicts` contains the metrics of each verdict shard,
    by reward term.

    Raises Quarantined if too many answers of a judge are invalid, or if a judge accepts too many canaries (known-bad
    answers mixed in as a test).
    """
    for term, reward in scoring.model_rewards.items():
        if reward.kind == "judge":
            _check_judge(term, reward, _sums(verdicts.get(term, ())), iteration)


def _check_judge(term: str, reward: JudgeReward, sums: Mapping[str, float], iteration: int) -> None:
    """Raise Quarantined if a judge gave too many invalid answers or accepted too many canaries (known-bad answers).
    `sums` contains the judge's metrics, summed over the iteration."""
    invalid, answers = sums["invalid"], sums["answers"]
    if isinstance(reward.verdict, StepsVerdict):
        _check_critiques(term, reward, sums, iteration)
    elif invalid > reward.max_invalid * answers:
        raise Quarantined(
            f"iteration {iteration}: {invalid:.0f} of {answers:.0f} answers of judge {term} contain no valid verdict "
            f"after {reward.retries} retries, but max_invalid allows only {reward.max_invalid:.1%}. Read some answers "
            "with `rheostat rollouts`, then change the judge's template or model."
        )
    passed, canaries = sums["canaries_passed"], sums["canaries"]
    if reward.canaries is not None and passed > reward.canaries.max_passing * canaries:
        raise Quarantined(
            f"iteration {iteration}: judge {term} accepted {passed:.0f} of {canaries:.0f} test answers that are known "
            f"to be wrong, but canaries.max_passing allows only {reward.canaries.max_passing:.1%}. The judge can be "
            "exploited: change its template, or use a better model."
        )


def _check_critiques(term: str, reward: JudgeReward, sums: Mapping[str, float], iteration: int) -> None:
    """Raise Quarantined if too many completions have no valid critique (list of wrong steps).

    Completions are counted instead of answers, because one valid vote on a completion is sufficient.
    """
    unusable, completions = sums["unusable"], sums["completions"]
    if unusable > reward.max_invalid * completions:
        raise Quarantined(
            f"iteration {iteration}: {unusable:.0f} of {completions:.0f} completions have no usable critique by judge "
            f"{term} after {reward.retries} retries, but max_invalid allows only {reward.max_invalid:.1%}. Change the "
            "judge's template or model."
        )


def _sums(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each metric that is checked over the verdict shards of an iteration."""
    names = ("answers", "invalid", "canaries", "canaries_passed", "completions", "unusable")
    return {name: sum(shard.get(name, 0.0) for shard in metrics) for name in names}
