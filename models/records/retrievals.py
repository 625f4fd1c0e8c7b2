"""Records of retrievers: training requests, quality measures, and results. Does not import torch."""

from dataclasses import dataclass

from rheostat.infra.config import Settings
from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.retriever import Terms


@dataclass(frozen=True, slots=True)
class StudentWork:
    """Request to train a dual encoder (the student), which embeds queries and passages separately."""

    pairs: BundleRef
    method: Terms
    teacher: BundleRef | None = None
    """Cross-encoder whose scores the student is trained to reproduce, or None to train without a teacher."""


@dataclass(frozen=True, slots=True)
class CrossEncoderWork:
    """Request to train a cross-encoder, and to let it rerank the best passages that a dual encoder finds."""

    pairs: BundleRef
    student: BundleRef


class Retrieval(Settings):
    """Quality measures of a retriever: how high it ranks the correct passages of held-out queries."""

    queries: int
    mrr: float
    """Mean over queries of 1 / rank of the correct passage, counting 0 for ranks beyond 10 (MRR@10)."""
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
    """Quality measures of each trained model, by name: dual encoders by their loss terms, and the cross-encoder, which
    reranks the passages that the first dual encoder finds."""

    def rows(self) -> list[dict[str, str]]:
        """Return one table row for each trained model, with the model's quality measures as text."""
        return [
            {
                "": model,
                "MRR@10": f"{measure.mrr:.3f}",
                "95% interval": f"{measure.low:.3f} to {measure.high:.3f}",
                "recall@50": f"{measure.recall:.3f}",
            }
            for model, measure in self.measured.items()
        ]
