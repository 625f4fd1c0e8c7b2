"""Scores of rubrics: a judge's verdicts on single criteria, combined by weight. Does not import torch."""

import json
from collections.abc import Sequence
from typing import Final

from rheostat.models.data.rubrics import Rubric
from rheostat.models.judges.verdicts import Answer, Judgement

KEPT_CHARACTERS: Final = 1000
"""Maximum number of characters that are stored of a judge's answer about one criterion."""


def combine_judgements(rubric: Rubric, judgements: Sequence[Judgement]) -> Judgement:
    """Combine the judgements on a rubric's criteria into one judgement on the completion: the weighted sum of their
    values divided by the sum of the positive weights, clipped to 0 to 1 (as in HealthBench, arXiv 2505.08775).

    The combined judgement is invalid if the judgement on one criterion is invalid.
    """
    for number, judgement in enumerate(judgements):
        if judgement.value is None:
            return Judgement(None, f"criterion {number}: {judgement.error}"[:200])
    values = [judgement.value or 0.0 for judgement in judgements]
    total = sum(criterion.weight * value for criterion, value in zip(rubric, values, strict=True))
    best = sum(max(criterion.weight, 0.0) for criterion in rubric)
    return Judgement(min(max(total / best, 0.0), 1.0), None)


def combine_answers(rubric: Rubric, answers: Sequence[Answer], judgements: Sequence[Judgement]) -> Answer:
    """Combine a judge's answers about all criteria of a rubric into one answer. Its text lists, as JSON, each criterion
    with its weight, its value and the judge's answer."""
    rows = [
        {
            "criterion": criterion.text,
            "weight": criterion.weight,
            "value": judgement.value,
            **({} if answer.text is None else {"answer": answer.text[:KEPT_CHARACTERS]}),
            **({} if judgement.error is None else {"error": judgement.error}),
        }
        for criterion, answer, judgement in zip(rubric, answers, judgements, strict=True)
    ]
    return Answer(
        text=json.dumps(rows, ensure_ascii=False),
        probabilities=None,
        tokens=sum(answer.tokens for answer in answers),
        error=next((answer.error for answer in answers if answer.error is not None), None),
        tokens_read=sum(answer.tokens_read for answer in answers),
    )
