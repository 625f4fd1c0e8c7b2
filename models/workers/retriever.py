"""Worker that trains retrievers.
It reads training pairs by reference and publishes sentence-transformers directories.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from transformers.utils import logging as transformers_logging

from rheostat.infra.store.bundles import BundleRef, fetch_bundle, fetch_bundle_file, publish_bundle
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.store.storage import open_store
from rheostat.models.config.retriever import EncoderConfig, RetrieverConfig
from rheostat.models.records.retrievals import CrossEncoderWork, StudentWork
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.retrieval.encoders import (
    build_scratch,
    check_directory,
    open_cross_encoder,
    open_encoder,
    require_library,
)
from rheostat.models.retrieval.pairs import PairSet, load_pairs

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from rheostat.models.retrieval.measure import Ranks

PAIRS: Final = "pairs.json"


class RetrieverWorker:
    """Worker that trains the models of a retriever: a dual encoder and, for distillation, a cross-encoder that teaches
    it. The same work gives the same bytes on one CPU."""

    def __init__(self, store_uri: str, config: RetrieverConfig, threads: int) -> None:
        """Check the configuration without writing anything.

        Raises BadInput if the sentence-transformers library is missing or a configured directory does not contain an
        encoder.
        """
        require_library("rheostat retriever")
        torch.set_num_threads(threads)
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()  # transformers warns about every newly initialized head
        self._store, self._config, self._progress = open_store(store_uri), config, 0
        for name, learning in (("encoder", config.encoder), ("cross_encoder", config.cross_encoder)):
            if learning.path is not None:
                check_directory(learning.path, f"{name}.path")

    def progress(self) -> int:
        """Return the number of training steps so far. If the number stops growing, the worker is stuck."""
        return self._progress

    def check_pairs(self, config: RetrieverConfig) -> Outcome:
        """Build or read the training pairs (query and passage) without writing anything. Raises BadInput if there are
        too few pairs."""
        load_pairs(config)
        return Outcome()

    def make_pairs(self, config: RetrieverConfig) -> Outcome:
        """Build or read the training pairs (query and passage) and publish them in the store."""
        pairs = load_pairs(config)
        with self._store.scratch() as folder:
            (folder / PAIRS).write_text(pairs.model_dump_json())
            ref = publish_bundle(self._store, folder, prefix="pairs")
        counts = {"train": len(pairs.train), "heldout": len(pairs.heldout), "passages": len(pairs.passages)}
        return Outcome(model=ModelVersion(0, ref), metrics={name: float(count) for name, count in counts.items()})

    def train_student(self, work: StudentWork) -> Outcome:
        """Train a dual encoder with the loss terms of `work.method` and publish it.

        The metrics measure at which rank the encoder finds the correct passage of each held-out query.
        """
        from rheostat.models.retrieval.measure import find
        from rheostat.models.retrieval.training import train_student

        config, started, pairs = self._config, time.perf_counter(), self._pairs(work.pairs)
        with self._start(config.encoder, pairs, tokens=config.max_tokens) as start:
            model = open_encoder(start, "encoder.path", max_tokens=config.max_tokens)
        teacher = None if work.teacher is None else self._cross_encoder(fetch_bundle(self._store, work.teacher))
        terms = train_student(model, pairs, config, method=work.method, teacher=teacher, on_step=self._count)
        ref, trained = self._publish(model), time.perf_counter()
        seconds = {"train": trained - started, "measure": time.perf_counter() - trained}
        return self._outcome(ref, find(model, pairs).ranks_B, terms, seconds)

    def train_cross_encoder(self, work: CrossEncoderWork) -> Outcome:
        """Train a cross-encoder and publish it as a teacher of dual encoders.

        For the metrics, the cross-encoder reorders the best passages that a dual encoder finds for each held-out query.
        The metrics measure at which rank the correct passage is afterwards.
        """
        from rheostat.models.retrieval.measure import find, rerank
        from rheostat.models.retrieval.training import train_teacher

        config, started, pairs = self._config, time.perf_counter(), self._pairs(work.pairs)
        with self._start(config.cross_encoder, pairs, tokens=2 * config.max_tokens) as start:
            model = self._cross_encoder(start)
        terms = train_teacher(model, pairs, config, on_step=self._count)
        ref, trained = self._publish(model), time.perf_counter()
        first = find(open_encoder(fetch_bundle(self._store, work.student), "student"), pairs).first
        ranks_B = rerank(model, pairs, first)
        seconds = {"train": trained - started, "measure": time.perf_counter() - trained}
        return self._outcome(ref, ranks_B, terms, seconds)

    def _count(self) -> None:
        self._progress += 1

    def _pairs(self, ref: BundleRef) -> PairSet:
        return PairSet.model_validate_json(fetch_bundle_file(self._store, ref, PAIRS).read_bytes())

    def _cross_encoder(self, directory: Path) -> "CrossEncoder":
        config, seed = self._config, derive_seed("cross-encoder", self._config.seed)
        return open_cross_encoder(directory, "cross_encoder.path", max_tokens=2 * config.max_tokens, seed=seed)

    @contextmanager
    def _start(self, learning: EncoderConfig, pairs: PairSet, *, tokens: int) -> Iterator[Path]:
        """Yield the directory of the model to train: the configured path, or a new model in a temporary directory,
        whose tokenizer is trained on the pairs."""
        if learning.path is not None:
            yield fetch_path(learning.path)
            return
        texts = [text for pair in (*pairs.train, *pairs.heldout) for text in (pair.query, pair.passage)]
        with self._store.scratch() as folder:
            seed = derive_seed("encoder", self._config.seed)
            build_scratch(learning, folder, texts=texts, max_tokens=tokens, seed=seed)
            yield folder

    def _publish(self, model: "SentenceTransformer | CrossEncoder") -> BundleRef:
        with self._store.scratch() as folder:
            model.save_pretrained(str(folder), create_model_card=False)
            return publish_bundle(self._store, folder, prefix="models")

    def _outcome(
        self, ref: BundleRef, ranks_B: "Ranks", terms: Mapping[str, float], seconds: Mapping[str, float]
    ) -> Outcome:
        from rheostat.models.retrieval.measure import retrieval_of

        measured = retrieval_of(ranks_B, seed=derive_seed("bootstrap", self._config.seed))
        return Outcome(
            model=ModelVersion(0, ref), metrics=measured.model_dump(), detail={"terms": {**terms}}, timings={**seconds}
        )
