"""Held-out problems that are also training problems, literally or nearly.

A held-out prompt is nearly in the training data if most of its word n-grams occur in training prompts. The authors of
GPT-3 searched for benchmarks in their training data in this way (arXiv 2005.14165, appendix C). This module does not
import torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from rheostat.infra.config import Settings
from rheostat.models.data.canonical import fold_text

WORDS = 13
"""Number of words of an n-gram, as in the contamination analysis of GPT-3."""
NEAR = 0.8
"""Minimum share of a held-out prompt's n-grams that must occur in training prompts for the prompt to be counted as a
near-duplicate."""
COMMON = 10
"""Number of held-out prompts from which on a shared n-gram is ignored, because it probably belongs to a prompt
template."""
_NAMED = 5


class Contamination(Settings):
    """Number of held-out problems of a suite that also occur among the training problems, literally or nearly."""

    prompts: int
    """Number of problems in the suite (the fixed problems on which policies are compared)."""
    exact: int
    """Number of problems of the suite that also are, word for word, training problems of this run or of an earlier
    champion."""
    near: int
    """Number of further problems whose n-grams nearly all occur in training prompts."""
    examples: tuple[str, ...]
    """Ids of the first few problems that occur among the training problems, literally or nearly."""

    @property
    def share(self) -> float:
        """Share of the suite's problems that occur among the training problems, literally or nearly."""
        return (self.exact + self.near) / self.prompts if self.prompts else 0.0

    def text(self) -> str:
        """Return one line for messages, with the number of such problems and the ids of the first few."""
        num_known = self.exact + self.near
        kinds = f"{self.exact} word for word, {self.near} nearly"
        named = f"{', '.join(self.examples)}{', …' if num_known > len(self.examples) else ''}"
        return f"{num_known} of {self.prompts:,} problems ({kinds}) are also training problems: {named}"


def contamination(
    heldout: Mapping[str, str],
    training: Iterable[str],
    *,
    before: frozenset[str] = frozenset(),
    words: int = WORDS,
    near: float = NEAR,
) -> Contamination:
    """Count the held-out prompts that occur among the training prompts, literally or nearly.

    `heldout` maps the ids of problems to their texts (`identity` of the prompt). Problems whose ids are in `before` are
    counted as literal repetitions, because an earlier run was trained on them. The texts of that run may be deleted.
    `near` is the share of n-grams from which a prompt is counted as a near-duplicate.

    Words are separated by white space. Their case and Unicode normalization are ignored. A text of fewer than `words`
    words is a single n-gram, which occurs only if a training prompt is the same text. Training prompts are processed
    one by one, so memory grows only with the number of held-out n-grams.
    """
    grams = {name: _ngrams(text, words) for name, text in heldout.items()}
    counts = Counter(gram for each in grams.values() for gram in each)
    rare_grams = frozenset(gram for gram, count in counts.items() if count < COMMON)
    texts = frozenset(heldout.values())
    same, known_grams = set[str](), set[str]()
    for text in training:
        if text in texts:
            same.add(text)
        known_grams |= rare_grams & _ngrams(text, words)
    exact = {name: None for name, text in heldout.items() if text in same or name in before}
    others = {name: each & rare_grams for name, each in grams.items() if name not in exact}
    close = [name for name, each in others.items() if each and len(each & known_grams) >= near * len(each)]
    named = {*exact, *close}
    examples = tuple(name for name in heldout if name in named)[:_NAMED]
    return Contamination(prompts=len(heldout), exact=len(exact), near=len(close), examples=examples)


def _ngrams(text: str, words: int) -> set[str]:
    """Return all n-grams of `words` words in a text, or the whole text if it has fewer words."""
    parts = fold_text(text).split()
    return {" ".join(parts[at : at + words]) for at in range(max(1, len(parts) - words + 1))}
