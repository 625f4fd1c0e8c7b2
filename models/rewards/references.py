"""Rewards that compare the words of a completion with a reference answer: exact match, F1, ROUGE and BLEU."""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Final

from rheostat.models.config.text_rewards import BleuReward, ExactMatchReward, F1Reward, ReferenceReward, RougeReward
from rheostat.models.rewards.packages import require_package
from rheostat.models.rewards.rules import Reward

Compare = Callable[[str, str], float]
"""Function that returns how well a completion matches one reference, from 0 to 1. White space at the ends of both texts
is already removed."""

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


def exact_match_reward(config: ExactMatchReward) -> Reward:
    """Return a reward function whose score is 1 if completion and reference are the same text after normalization, else
    0."""
    change = _normalize if config.normalize == "squad" else str
    return _compare_with_references(
        config, lambda completion, reference: float(change(completion) == change(reference))
    )


def f1_reward(config: F1Reward) -> Reward:
    """Return a reward function whose score is the word-level F1 score between completion and reference."""

    def compare(completion: str, reference: str) -> float:
        """Return the harmonic mean of precision and recall. Two texts without words are equal."""
        words, expected = _normalize(completion).split(), _normalize(reference).split()
        if not words or not expected:
            return float(words == expected)
        shared = (Counter(words) & Counter(expected)).total()
        return 2 * shared / (len(words) + len(expected))

    return _compare_with_references(config, compare)


def rouge_reward(config: RougeReward) -> Reward:
    """Return a reward function whose score is the ROUGE score of the completion against the reference. Raises BadInput
    if rouge-score is not installed."""
    require_package("rouge_score", "rouge-score", f"reward {config.kind!r}")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([config.variant], use_stemmer=config.stemming)
    field = {"f1": "fmeasure"}.get(config.value, config.value)

    def compare(completion: str, reference: str) -> float:
        """Return the ROUGE precision, recall or F1 of a completion, as configured."""
        return float(getattr(scorer.score(reference, completion)[config.variant], field))

    return _compare_with_references(config, compare)


def bleu_reward(config: BleuReward) -> Reward:
    """Return a reward function whose score is the sentence BLEU score against the reference, divided by 100. Raises
    BadInput if sacrebleu is not installed."""
    require_package("sacrebleu", "sacrebleu", f"reward {config.kind!r}")
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(tokenize=config.tokenize, effective_order=True)

    def compare(completion: str, reference: str) -> float:
        """Return the BLEU score, from 0 to 1. Values slightly above 1, which result from rounding in sacrebleu, become
        1."""
        return min(float(bleu.sentence_score(completion, [reference]).score) / 100, 1.0)

    return _compare_with_references(config, compare)


def _compare_with_references(config: ReferenceReward, compare: Compare) -> Reward:
    """Return a reward function that compares the completion with each alternative reference, and returns the best
    score."""

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return the best score. Raises ValueError if there is no reference."""
        separator = config.reference_separator
        references = [text.strip() for text in (answer.split(separator) if separator else [answer])]
        if not any(references):
            raise ValueError(
                f"the reward {config.label!r} compares completions with the reference answer, but the reference answer "
                "of this problem is empty. Fill it in, or set data.answer_column to the column with the answers"
            )
        return max(compare(completion.strip(), reference) for reference in references if reference)

    return reward


def _normalize(text: str) -> str:
    """Normalize a text as SQuAD's evaluation does: lower case, no punctuation, no English articles, and single spaces
    between words."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())
