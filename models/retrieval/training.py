"""Training of a dual encoder and its cross-encoder on pairs. The same work gives the same weights on one CPU.

Shapes: B queries, N passages of the whole batch, K listed candidates of a query, D dimensions of an embedding, L tokens
of a text.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn import functional

from rheostat.models.config.retriever import EncoderConfig, RetrieverConfig, Terms
from rheostat.models.records.seeds import derive_seed
from rheostat.models.retrieval.loss import TeacherScores, dense_scores, late_scores, loss_terms
from rheostat.models.retrieval.pairs import Pair, PairSet

logger = logging.getLogger(__name__)

WARMUP_SHARE: float = 0.1
"""Fraction of the training steps during which the learning rate rises to its peak."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Batch of one training step: queries, and for each query its correct passage followed by its hard negatives."""

    queries: list[str]
    passages: list[str]

    def listed(self) -> Tensor:
        """Return the indices of the passages that belong to each query, of shape (B, K). The first is the correct
        passage."""
        return torch.arange(len(self.passages)).view(len(self.queries), -1)

    def candidates(self) -> Tensor:
        """Return a boolean mask over queries and passages, of shape (B, N). It is false for duplicates of a query's
        correct passage, which would be counted as wrong."""
        own_B1 = self.listed()[:, :1]
        rights = [self.passages[place] for place in own_B1[:, 0].tolist()]
        others_BN = torch.tensor([[text != right for text in self.passages] for right in rights])
        return others_BN.scatter(1, own_B1, True)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings of texts by the dual encoder: one vector for each text, and one for each token."""

    vector_BD: Tensor
    tokens_BLD: Tensor
    mask_BL: Tensor


def batches(pairs: PairSet, learning: EncoderConfig, *, negatives: int, seed: int) -> Iterator[PairBatch]:
    """Yield one batch for each training step, each with `negatives` hard negatives per query. The pairs are reshuffled
    in each epoch, and hard negatives are sampled again.

    If a pair has too few hard negatives, random passages are added.
    """
    rng, corpus, order = random.Random(seed), pairs.passages, list[Pair]()
    for _ in range(learning.steps):
        if len(order) < learning.batch_size:
            order = rng.sample(pairs.train, len(pairs.train))
        chosen, order = order[: learning.batch_size], order[learning.batch_size :]
        passages = list[str]()
        for pair in chosen:
            hard = rng.sample(pair.negatives, min(negatives, len(pair.negatives)))
            passages += [pair.passage, *hard, *(rng.choice(corpus) for _ in range(negatives - len(hard)))]
        yield PairBatch([pair.query for pair in chosen], passages)


def train_student(
    model: SentenceTransformer,
    pairs: PairSet,
    config: RetrieverConfig,
    *,
    method: Terms,
    teacher: CrossEncoder | None = None,
    on_step: Callable[[], None],
) -> dict[str, float]:
    """Train the dual encoder (the student). If the method includes distillation, `teacher` is the cross-encoder whose
    scores the student learns.

    `on_step` is called after each step. Returns the mean of each loss term over the last tenth of the steps.
    """

    def terms(batch: PairBatch) -> dict[str, Tensor]:
        """Compute the loss terms of one batch."""
        queries, passages = embed(model, batch.queries), embed(model, batch.passages)
        listed_BK = batch.listed().to(model.device)
        teacher_scores = None
        if teacher is not None:
            with torch.no_grad():
                teacher_scores = TeacherScores(listed_BK, cross_scores(teacher, batch))
        return loss_terms(
            dense_scores(queries.vector_BD, passages.vector_BD),
            late_scores(queries.tokens_BLD, queries.mask_BL, passages.tokens_BLD, passages.mask_BL),
            listed_BK[:, 0],
            candidates_BN=batch.candidates().to(model.device),
            method=method,
            taught=teacher_scores,
        )

    # the same for all methods, so that their runs differ only in the loss terms
    seed = derive_seed("dual encoder", config.seed)
    each = batches(pairs, config.encoder, negatives=config.negatives, seed=seed)
    return _train(model, config.encoder, each, terms, what=f"{method}: dual encoder", config=config, on_step=on_step)


def train_teacher(
    model: CrossEncoder, pairs: PairSet, config: RetrieverConfig, *, on_step: Callable[[], None]
) -> dict[str, float]:
    """Train the cross-encoder to score the correct passage of a query higher than the query's negatives.

    `on_step` is called after each step. Returns the mean loss over the last tenth of the steps.
    """

    def terms(batch: PairBatch) -> dict[str, Tensor]:
        """Compute the cross-entropy loss of one batch."""
        scores_BK = cross_scores(model, batch)
        return {"cross": functional.cross_entropy(scores_BK, scores_BK.new_zeros(len(scores_BK), dtype=torch.long))}

    seed = derive_seed("cross-encoder", config.seed)
    each = batches(pairs, config.cross_encoder, negatives=config.negatives, seed=seed)
    return _train(model, config.cross_encoder, each, terms, what="cross-encoder", config=config, on_step=on_step)


def embed(model: SentenceTransformer, texts: list[str]) -> Embedded:
    """Embed texts as one vector per text and one vector per token. Gradients are kept for training."""
    outputs = model(batch_to_device(model.preprocess(texts), model.device))
    return Embedded(outputs["sentence_embedding"], outputs["token_embeddings"], outputs["attention_mask"])


def cross_scores(model: CrossEncoder, batch: PairBatch) -> Tensor:
    """Return the cross-encoder's scores of each query with the passages listed for it, of shape (B, K). They have
    gradients unless gradients are disabled."""
    each = len(batch.passages) // len(batch.queries)
    query_passages = [(batch.queries[place // each], passage) for place, passage in enumerate(batch.passages)]
    scores: Tensor = model(batch_to_device(model.preprocess(query_passages), model.device))["scores"]
    return scores.view(len(batch.queries), each)


def _train(
    model: nn.Module,
    learning: EncoderConfig,
    batches: Iterator[PairBatch],
    terms: Callable[[PairBatch], dict[str, Tensor]],
    *,
    what: str,
    config: RetrieverConfig,
    on_step: Callable[[], None],
) -> dict[str, float]:
    """Minimize the sum of the loss terms with AdamW, linear warm-up and linear decay. `what` names the model in
    messages. Returns the mean of each term over the last tenth of the steps."""
    steps, warm = learning.steps, max(1.0, WARMUP_SHARE * learning.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1.0, steps - warm))
    )
    began, last = time.perf_counter(), list[dict[str, float]]()
    torch.manual_seed(derive_seed(what, config.seed))  # seeds the dropout of pretrained encoders
    model.train()
    for step, batch in enumerate(batches, start=1):
        batch_terms = terms(batch)
        loss = torch.stack([*batch_terms.values()]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step()
        if step > 0.9 * steps:
            last.append({name: term.item() for name, term in batch_terms.items()})
        if step % config.report_steps == 0 or step == steps:
            seconds = time.perf_counter() - began
            logger.info("%s: step %d of %d, loss %.3f, %.0f s", what, step, steps, loss.item(), seconds)
    model.eval()
    return {name: sum(each[name] for each in last) / len(last) for name in last[0]}
