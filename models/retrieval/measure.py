"""Evaluation of a retriever on held-out queries: the rank of the correct passage among all passages or a shortlist.

Shapes: B queries, N passages, D dimensions of an embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from rheostat.models.records.retrievals import Retrieval
from rheostat.models.retrieval.pairs import PairSet

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

Ranks = NDArray[np.int64]

MRR_AT: Final = 10
RECALL_AT: Final = 50
"""Number of best passages that the cross-encoder reranks, and in which recall@50 looks for the correct passage."""
RESAMPLES: Final = 2000


def retrieval_of(ranks_B: Ranks, *, seed: int) -> Retrieval:
    """Compute recall@50 and MRR@10 with its 95% bootstrap confidence interval. `ranks_B` is the rank of each query's
    correct passage, starting with 1."""
    reciprocal_ranks_B = np.where(ranks_B <= MRR_AT, 1 / ranks_B, 0.0)
    resampled = np.random.default_rng(seed).integers(len(reciprocal_ranks_B), size=(RESAMPLES, len(reciprocal_ranks_B)))
    low, high = np.quantile(reciprocal_ranks_B[resampled].mean(1), (0.025, 0.975))
    recall = float((ranks_B <= RECALL_AT).mean())
    return Retrieval(
        queries=len(ranks_B), mrr=float(reciprocal_ranks_B.mean()), low=float(low), high=float(high), recall=recall
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search by a dual encoder: for each query, the rank of the correct passage (`ranks_B`) and the best
    passages in order (`first`)."""

    ranks_B: Ranks
    first: list[list[str]]


def find(model: "SentenceTransformer", pairs: PairSet) -> Found:
    """Search all passages for each held-out query by the dot product of embeddings.

    Passages with the same score as the correct one are ranked before it.
    """
    passages, queries = pairs.passages, [pair.query for pair in pairs.heldout]
    query_BD, passage_ND = (
        model.encode([*texts], batch_size=64, show_progress_bar=False) for texts in (queries, passages)
    )
    scores_BN, places = query_BD @ passage_ND.T, {text: place for place, text in enumerate(passages)}
    own_B = np.array([places[pair.passage] for pair in pairs.heldout])
    ranks_B = (scores_BN >= np.take_along_axis(scores_BN, own_B[:, None], 1)).sum(1)
    order_BN = np.argsort(-scores_BN, axis=1, kind="stable")[:, :RECALL_AT]
    return Found(ranks_B, [[passages[place] for place in row] for row in order_BN.tolist()])


def rerank(model: "CrossEncoder", pairs: PairSet, first: Sequence[Sequence[str]]) -> Ranks:
    """Reorder the best passages of each query (`first`) by the cross-encoder's scores, and return the new ranks of the
    correct passages.

    A correct passage that is not among the best passages gets the rank of the last passage of all.
    """
    ranks = list[int]()
    for pair, passages in zip(pairs.heldout, first, strict=True):
        scores = model.predict([(pair.query, text) for text in passages], batch_size=64, show_progress_bar=False)
        right = [score for score, text in zip(scores, passages, strict=True) if text == pair.passage]
        ranks.append(int((scores >= right[0]).sum()) if right else len(pairs.passages))
    return np.array(ranks)
