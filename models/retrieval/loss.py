"""Loss of a dual encoder that is distilled from late interaction and a cross-encoder (ERNIE-Search, arXiv 2205.09153).

Shapes: B queries, N passages of the whole batch, K listed candidates of a query (its own passage and hard negatives), L
and M tokens of a query and of a passage, D dimensions of an embedding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rheostat.models.config.retriever import Terms

FORBIDDEN = -1e9
"""Score assigned to passages that are not candidates, low enough that their softmax probability is 0."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Scores of the cross-encoder (the teacher) for the listed candidates of each query: its correct passage and its
    negatives."""

    listed_BK: Tensor
    """Index of each listed candidate among the N passages of the batch."""
    scores_BK: Tensor


def dense_scores(query_BD: Tensor, passage_ND: Tensor) -> Tensor:
    """Return the dual encoder's scores s_DE(q, p) = ⟨q, p⟩ of all B queries with all N passages, of shape (B, N)."""
    return query_BD @ passage_ND.T


def late_scores(query_BLD: Tensor, query_mask_BL: Tensor, passage_NMD: Tensor, passage_mask_NM: Tensor) -> Tensor:
    """Return the late-interaction scores s_LI(q, p) = Σ_i max_j ⟨q_i, p_j⟩ / √D over token embeddings, without padding,
    of shape (B, N).

    The paper does not divide by √D. Without the division, these sums over tokens would be much larger than the single
    product of s_DE, and the student would begin to learn late.
    """
    similar_BNLM = torch.einsum("bld,nmd->bnlm", query_BLD, passage_NMD) / math.sqrt(query_BLD.shape[-1])
    similar_BNLM = similar_BNLM.masked_fill(~passage_mask_NM.bool()[None, :, None, :], FORBIDDEN)
    return (similar_BNLM.amax(-1) * query_mask_BL[:, None, :]).sum(-1)


def divergence(teacher_BN: Tensor, student_BN: Tensor) -> Tensor:
    """Return KL(P_teacher ‖ P_student), averaged over queries. Both distributions are softmaxes of scores over the
    passages. No gradient reaches the teacher."""
    targets = functional.log_softmax(teacher_BN.detach(), -1)
    return functional.kl_div(functional.log_softmax(student_BN, -1), targets, reduction="batchmean", log_target=True)


def loss_terms(
    dense_BN: Tensor,
    late_BN: Tensor,
    own_B: Tensor,
    *,
    candidates_BN: Tensor,
    method: Terms,
    taught: TeacherScores | None = None,
) -> dict[str, Tensor]:
    """Return the terms of −log P_DE(p⁺) − log P_LI(p⁺) + KL(P_LI ‖ P_DE) + KL(P_CE ‖ P_LI) + KL(P_CE ‖ P_DE), by name.

    DE is the dual encoder (`dense_BN`), LI late interaction (`late_BN`) and CE the cross-encoder (`taught`). `own_B` is
    the index of each query's correct passage p⁺. Passages outside the mask `candidates_BN` have probability 0. In the
    two terms with P_CE, all distributions cover only the candidates listed in `taught`. `method` selects which terms
    are returned.
    """
    dense_BN, late_BN = (scores.masked_fill(~candidates_BN, FORBIDDEN) for scores in (dense_BN, late_BN))
    terms = {"dense": functional.cross_entropy(dense_BN, own_B)}
    if method == "dual":
        return terms
    terms["late"] = functional.cross_entropy(late_BN, own_B)
    terms["late to dense"] = divergence(late_BN, dense_BN)
    if method == "cascade":
        assert taught is not None, "the cascade needs the scores of a cross-encoder"
        terms["cross to late"] = divergence(taught.scores_BK, late_BN.gather(1, taught.listed_BK))
        terms["cross to dense"] = divergence(taught.scores_BK, dense_BN.gather(1, taught.listed_BK))
    return terms
