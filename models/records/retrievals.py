"""What is asked of a retriever's worker, what a retriever is worth, and what became of one. Torch-free."""

from dataclasses import dataclass

from infra.config import Settings
from infra.store.bundles import BundleRef
from models.config.retriever import Terms


@dataclass(frozen=True, slots=True)
class StudentWork:
    """Train a dual encoder."""

    pairs: BundleRef
    method: Terms
    teacher: BundleRef | None = None
    """The cross-encoder of a cascade."""


@dataclass(frozen=True, slots=True)
class CrossEncoderWork:
    """Train a cross-encoder, and rank again by it what a dual encoder finds first."""

    pairs: BundleRef
    student: BundleRef


class Retrieval(Settings):
    """How early the right passages of held-out queries come."""

    queries: int
    mrr: float
    """Mean of 1 / rank, or of 0 where the rank is beyond 10 (MRR@10)."""
    low: float
    """Of its 95% interval: bootstrap of queries, percentiles."""
    high: float
    recall: float
    """Share of queries whose right passage is among the first 50 (recall@50)."""


class MadeRetriever(Settings):
    """A retriever as its last manifest has it."""

    name: str
    path: str
    """Its directory, of sentence-transformers."""
    digest: str
    """Of its files together."""
    method: Terms
    """Terms of the loss by which it was trained."""
    decision: str
    """Why these, in words."""
    measured: dict[str, Retrieval]
    """By what was trained: the students by their terms, and the cross-encoder among what the first student finds."""

    def rows(self) -> list[dict[str, str]]:
        """The table of what was measured."""
        return [
            {
                "": what,
                "MRR@10": f"{found.mrr:.3f}",
                "95% interval": f"{found.low:.3f} to {found.high:.3f}",
                "recall@50": f"{found.recall:.3f}",
            }
            for what, found in self.measured.items()
        ]
