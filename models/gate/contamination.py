"""Held-out problems that are among those trained on, word for word or nearly. Torch-free.

Near means containment: of a held-out prompt's n-grams of words, the share that occurs in training prompts, as GPT-3's
authors looked for benchmarks in its data (arXiv 2005.14165, appendix C).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from infra.config import Settings

WORDS = 13
"""Of an n-gram, as GPT-3 has them."""
NEAR = 0.8
"""Share of a prompt's n-grams from which it counts as trained on."""
COMMON = 10
"""N-grams of so many held-out prompts are a template's, and say nothing of one of them."""
_NAMED = 5


class Contamination(Settings):
    """How many of the problems of a suite are among those trained on."""

    prompts: int
    """Problems of the suite."""
    exact: int
    """Those that are trained on word for word, now or by the champions before."""
    near: int
    """Others whose n-grams of words are nearly all among those trained on."""
    examples: tuple[str, ...]
    """Ids of the first few of both."""

    @property
    def share(self) -> float:
        """Share of the suite, both together."""
        return (self.exact + self.near) / self.prompts if self.prompts else 0.0

    def text(self) -> str:
        """Say in a line how many they are, and name the first few."""
        found = self.exact + self.near
        kinds = f"{self.exact} word for word, {self.near} nearly"
        named = f"{', '.join(self.examples)}{', …' if found > len(self.examples) else ''}"
        return f"{found} of its {self.prompts:,} problems ({kinds}) are among those trained on: {named}"


def contamination(
    heldout: Mapping[str, str],
    training: Iterable[str],
    *,
    before: frozenset[str] = frozenset(),
    words: int = WORDS,
    near: float = NEAR,
) -> Contamination:
    """Count held-out prompts, by id, that training prompts repeat; a text is a problem's `identity`.

    Ids in `before` were trained on by an earlier run, whose texts may be gone.

    Words are what white space parts, in whatever case. A text of fewer than n is one n-gram, and occurs where it is a
    training prompt as a whole. Memory grows with the held-out n-grams only: training prompts pass by.
    """
    grams = {name: _ngrams(text, words) for name, text in heldout.items()}
    counts = Counter(gram for each in grams.values() for gram in each)
    wanted = frozenset(gram for gram, count in counts.items() if count < COMMON)
    texts = frozenset(heldout.values())
    same, found = set[str](), set[str]()
    for text in training:
        if text in texts:
            same.add(text)
        found |= wanted & _ngrams(text, words)
    exact = {name: None for name, text in heldout.items() if text in same or name in before}
    others = {name: each & wanted for name, each in grams.items() if name not in exact}
    close = [name for name, each in others.items() if each and len(each & found) >= near * len(each)]
    named = {*exact, *close}
    examples = tuple(name for name in heldout if name in named)[:_NAMED]
    return Contamination(prompts=len(heldout), exact=len(exact), near=len(close), examples=examples)


def _ngrams(text: str, words: int) -> set[str]:
    """Every run of so many words; the whole text where it has fewer."""
    parts = text.casefold().split()
    return {" ".join(parts[at : at + words]) for at in range(max(1, len(parts) - words + 1))}
