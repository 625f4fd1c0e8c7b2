"""How a dual encoder and its cross-encoder learn from pairs; the same work gives the same weights on one CPU.

B queries, N passages of the whole batch, K listed candidates of a query, D numbers of an embedding, L tokens of a text.
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

from models.config.retriever import EncoderConfig, RetrieverConfig, Terms
from models.records.seeds import derive_seed
from models.retrieval.loss import Taught, dense_scores, late_scores, loss_terms
from models.retrieval.pairs import Pair, PairSet

logger = logging.getLogger(__name__)

WARMING: float = 0.1
"""Share of the steps over which the learning rate rises."""


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Queries with their passages: of each query its own and then its negatives, query after query."""

    queries: list[str]
    passages: list[str]

    def listed(self) -> Tensor:
        """Places of each query's own passages, (B, K), the right one first."""
        return torch.arange(len(self.passages)).view(len(self.queries), -1)

    def candidates(self) -> Tensor:
        """Whether a query is compared with a passage, (B, N): with all but other copies of the right one."""
        own_B1 = self.listed()[:, :1]
        rights = [self.passages[place] for place in own_B1[:, 0].tolist()]
        others_BN = torch.tensor([[text != right for text in self.passages] for right in rights])
        return others_BN.scatter(1, own_B1, True)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Texts as the dual encoder has them: as a vector, and token by token."""

    vector_BD: Tensor
    tokens_BLD: Tensor
    mask_BL: Tensor


def batches(pairs: PairSet, learning: EncoderConfig, *, negatives: int, seed: int) -> Iterator[PairBatch]:
    """Shuffle the training pairs again and again; hard negatives are drawn anew each time.

    A pair that has too few is given others of the corpus.
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
    """Train the dual encoder; return the mean of each of its terms over the last tenth of the steps."""

    def terms(batch: PairBatch) -> dict[str, Tensor]:
        queries, passages = embed(model, batch.queries), embed(model, batch.passages)
        listed_BK = batch.listed().to(model.device)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = Taught(listed_BK, cross_scores(teacher, batch))
        return loss_terms(
            dense_scores(queries.vector_BD, passages.vector_BD),
            late_scores(queries.tokens_BLD, queries.mask_BL, passages.tokens_BLD, passages.mask_BL),
            listed_BK[:, 0],
            candidates_BN=batch.candidates().to(model.device),
            method=method,
            taught=taught,
        )

    seed = derive_seed("dual encoder", config.seed)  # of the method's terms nothing else differs
    each = batches(pairs, config.encoder, negatives=config.negatives, seed=seed)
    return _train(model, config.encoder, each, terms, what=f"{method}: dual encoder", config=config, on_step=on_step)


def train_teacher(
    model: CrossEncoder, pairs: PairSet, config: RetrieverConfig, *, on_step: Callable[[], None]
) -> dict[str, float]:
    """Train the cross-encoder to find the right passage among the listed ones; return the mean of its last losses."""

    def terms(batch: PairBatch) -> dict[str, Tensor]:
        scores_BK = cross_scores(model, batch)
        return {"cross": functional.cross_entropy(scores_BK, scores_BK.new_zeros(len(scores_BK), dtype=torch.long))}

    seed = derive_seed("cross-encoder", config.seed)
    each = batches(pairs, config.cross_encoder, negatives=config.negatives, seed=seed)
    return _train(model, config.cross_encoder, each, terms, what="cross-encoder", config=config, on_step=on_step)


def embed(model: SentenceTransformer, texts: list[str]) -> Embedded:
    """Read texts, with gradients."""
    found = model(batch_to_device(model.preprocess(texts), model.device))
    return Embedded(found["sentence_embedding"], found["token_embeddings"], found["attention_mask"])


def cross_scores(model: CrossEncoder, batch: PairBatch) -> Tensor:
    """s_CE of the listed candidates, (B, K), with gradients where they are asked for."""
    each = len(batch.passages) // len(batch.queries)
    asked = [(batch.queries[place // each], passage) for place, passage in enumerate(batch.passages)]
    found: Tensor = model(batch_to_device(model.preprocess(asked), model.device))["scores"]
    return found.view(len(batch.queries), each)


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
    """Minimise the sum of a batch's terms."""
    steps, warm = learning.steps, max(1.0, WARMING * learning.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1.0, steps - warm))
    )
    began, last = time.perf_counter(), list[dict[str, float]]()
    torch.manual_seed(derive_seed(what, config.seed))  # dropout of encoders from elsewhere
    model.train()
    for step, batch in enumerate(batches, start=1):
        found = terms(batch)
        loss = torch.stack([*found.values()]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step()
        if step > 0.9 * steps:
            last.append({name: term.item() for name, term in found.items()})
        if step % config.report_steps == 0 or step == steps:
            seconds = time.perf_counter() - began
            logger.info("%s: step %d of %d, loss %.3f, %.0f s", what, step, steps, loss.item(), seconds)
    model.eval()
    return {name: sum(each[name] for each in last) / len(last) for name in last[0]}
