"""The loss of a dual encoder that learns from late interaction and a cross-encoder (ERNIE-Search, arXiv 2205.09153).

B queries, N passages of the whole batch, K listed candidates of a query (its own and its hard negatives), L and M
tokens of a query and a passage, D numbers of an embedding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.config.retriever import Terms

FORBIDDEN = -1e9
"""Score of a passage that is no candidate: its probability is 0, and so is its part of a divergence."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What a cross-encoder says of the listed candidates."""

    listed_BK: Tensor
    """Their places among the passages."""
    scores_BK: Tensor


def dense_scores(query_BD: Tensor, passage_ND: Tensor) -> Tensor:
    """s_DE(q, p) = ⟨q, p⟩, (B, N)."""
    return query_BD @ passage_ND.T


def late_scores(query_BLD: Tensor, query_mask_BL: Tensor, passage_NMD: Tensor, passage_mask_NM: Tensor) -> Tensor:
    """s_LI(q, p) = Σ_i max_j ⟨q_i, p_j⟩ / √D over the tokens that are no padding, (B, N).

    The paper does not divide. Sums over tokens would then drown the one product of s_DE, and the student learns late.
    """
    similar_BNLM = torch.einsum("bld,nmd->bnlm", query_BLD, passage_NMD) / math.sqrt(query_BLD.shape[-1])
    similar_BNLM = similar_BNLM.masked_fill(~passage_mask_NM.bool()[None, :, None, :], FORBIDDEN)
    return (similar_BNLM.amax(-1) * query_mask_BL[:, None, :]).sum(-1)


def divergence(teacher_BN: Tensor, student_BN: Tensor) -> Tensor:
    """Mean of KL(P_teacher ‖ P_student) over queries, both softmax of scores; no gradient reaches the teacher."""
    targets = functional.log_softmax(teacher_BN.detach(), -1)
    return functional.kl_div(functional.log_softmax(student_BN, -1), targets, reduction="batchmean", log_target=True)


def loss_terms(
    dense_BN: Tensor,
    late_BN: Tensor,
    own_B: Tensor,
    *,
    candidates_BN: Tensor,
    method: Terms,
    taught: Taught | None = None,
) -> dict[str, Tensor]:
    """Terms of −log P_DE(p⁺) − log P_LI(p⁺) + KL(P_LI ‖ P_DE) + KL(P_CE ‖ P_LI) + KL(P_CE ‖ P_DE), by what they are.

    `own_B` are the places of the right passages. P_CE is over listed candidates alone, and so are P_LI and P_DE in its
    two terms.
    """
    dense_BN, late_BN = (scores.masked_fill(~candidates_BN, FORBIDDEN) for scores in (dense_BN, late_BN))
    terms = {"dense": functional.cross_entropy(dense_BN, own_B)}
    if method == "dual":
        return terms
    terms["late"] = functional.cross_entropy(late_BN, own_B)
    terms["late to dense"] = divergence(late_BN, dense_BN)
    if method == "cascade":
        assert taught is not None, "a cascade has a cross-encoder"
        terms["cross to late"] = divergence(taught.scores_BK, late_BN.gather(1, taught.listed_BK))
        terms["cross to dense"] = divergence(taught.scores_BK, dense_BN.gather(1, taught.listed_BK))
    return terms
