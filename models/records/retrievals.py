"""Records of retrievers: training requests, quality measures, and results. Does not import torch."""

from dataclasses import dataclass

from infra.config import Settings
from infra.store.bundles import BundleRef
from models.config.retriever import Terms


@dataclass(frozen=True, slots=True)
class StudentWork:
    """Request to train a dual encoder, which embeds queries and passages separately (the student)."""

    pairs: BundleRef
    method: Terms
    teacher: BundleRef | None = None
    """Cross-encoder whose scores the student is trained to reproduce, or None."""


@dataclass(frozen=True, slots=True)
class CrossEncoderWork:
    """Request to train a cross-encoder, and to rerank with it the first passages that a dual encoder finds."""

    pairs: BundleRef
    student: BundleRef


class Retrieval(Settings):
    """Quality of a retriever: how high it ranks the correct passages of held-out queries."""

    queries: int
    mrr: float
    """Mean of 1 / rank, counting 0 for ranks beyond 10 (MRR@10)."""
    low: float
    """Lower end of the 95% confidence interval of `mrr`, from a bootstrap over queries."""
    high: float
    recall: float
    """Share of queries whose correct passage is among the first 50 (recall@50)."""


class TrainedRetriever(Settings):
    """Trained retriever, as recorded in the last manifest of its run."""

    name: str
    path: str
    """Directory of the retriever in sentence-transformers format."""
    digest: str
    """Digest of all files in the retriever's directory."""
    method: Terms
    """Loss terms with which the dual encoder was trained."""
    decision: str
    """Sentence that explains, with measurements, why the model with these loss terms was chosen."""
    measured: dict[str, Retrieval]
    """Measures of each trained model: students by their loss terms, and the cross-encoder, which reranks the passages
    that the first student finds."""

    def rows(self) -> list[dict[str, str]]:
        """Return one table row per trained model, with its quality measures as text."""
        return [
            {
                "": model,
                "MRR@10": f"{measure.mrr:.3f}",
                "95% interval": f"{measure.low:.3f} to {measure.high:.3f}",
                "recall@50": f"{measure.recall:.3f}",
            }
            for model, measure in self.measured.items()
        ]
