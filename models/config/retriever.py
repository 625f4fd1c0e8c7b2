"""Configuration of `rheostat retriever`: pairs, encoders, and training of the dual encoder. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from infra.config import PoolsConfig, Positive, Settings, encode_recorded
from infra.store.inputs import Location, PathNames
from infra.variants import Variant
from models.config.file_rules import FileRules

RETRIEVERS: Final = "retrievers"
"""Folder of a store that contains the retrievers, next to the runs."""

Terms = Literal["dual", "self-distillation", "cascade"]


class PairSource(Variant):
    """Fields common to all sources of pairs. `implementation` names a `models.retrieval.pairs.PairFactory`."""


class TemplatedPairs(PairSource):
    """Facts with five attributes generated from a seed, and queries that express four of the attributes by synonyms."""

    implementation = "models.retrieval.pairs:templated_pairs"

    kind: Literal["templated"] = "templated"
    facts: Annotated[int, Field(ge=100, le=20_000)] = 2000
    """Number of passages. Each has one query."""


class PairFile(FileRules, PairSource):
    """Pairs from a file of JSON, CSV, Parquet or Arrow; the corpus to search consists of the passages of all rows."""

    implementation = "models.retrieval.pairs:file_pairs"

    kind: Literal["file"] = "file"
    path: Location
    """File of training pairs: .jsonl, .json with an array or .csv (each of these also compressed as .gz), .parquet or
    .arrow."""
    heldout_path: Location | None = None
    """File of pairs for the evaluation. If not set, `heldout_fraction` of the training file is kept for it."""
    query_column: str = "query"
    """Column with the query."""
    passage_column: str = "passage"
    """Column with the passage that answers the query."""
    negatives_column: str | None = None
    """Column with a list of similar passages that do not answer the query (hard negatives). If not set, random other
    passages are sampled."""


class EncoderConfig(Settings):
    """Configuration of an encoder and its training."""

    path: Location | None = None
    """Directory of the initial model, in Hugging Face or sentence-transformers format. If not set, a small BERT with
    random weights is built, with a tokenizer trained on the pairs."""
    hidden_size: Positive = 64
    """Hidden size of a new encoder, a multiple of `heads`, and the size of its embedding."""
    layers: Positive = 2
    """Number of transformer layers of a new encoder."""
    heads: Positive = 4
    """Number of attention heads of a new encoder."""
    vocab_size: Annotated[int, Field(ge=512)] = 4096
    """Maximum number of tokens of a new encoder's tokenizer."""
    steps: Positive = 600
    """Number of optimizer steps."""
    batch_size: Annotated[int, Field(ge=2)] = 32
    """Queries per step. Each is compared with the passages of all queries in the batch."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate: linear warm-up over 10% of the steps, then linear decay to 0. Use 2e-5 for pretrained
    encoders."""

    @model_validator(mode="after")
    def _require_divisible_heads(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}. Change "
                "one of them"
            )
        return self


class RetrieverConfig(Settings):
    """Complete configuration of the training of a retriever."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "retriever"
    """Name of the retriever in the store, below `retrievers/`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root seed of all random choices."""
    store: str = "./runs"
    """Store of the retriever: a directory, a file:// URI, or s3://bucket/prefix."""
    pairs: Annotated[TemplatedPairs | PairFile, Field(discriminator="kind")] = TemplatedPairs()
    """Pairs for training and evaluation."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for the evaluation if there is no separate file, selected by a hash of the passage."""
    method: Literal["checked", "dual", "self-distillation", "cascade"] = "checked"
    """Terms of the loss: `dual` trains the dual encoder alone, `self-distillation` adds the terms of late interaction,
    `cascade` adds those of a cross-encoder as well. `checked` adds the cross-encoder's terms only if the cross-encoder
    has a higher held-out MRR than the student."""
    max_tokens: Annotated[int, Field(ge=8)] = 64
    """Maximum length of a text in tokens. Longer texts are truncated. A query and a passage together may have twice
    this length."""
    negatives: Annotated[int, Field(ge=0, le=64)] = 3
    """Hard negatives per query and step, in addition to the passages of the other queries in the batch."""
    encoder: EncoderConfig = EncoderConfig()
    """Dual encoder: one encoder for queries and passages."""
    cross_encoder: EncoderConfig = EncoderConfig(steps=1200)
    """Cross-encoder, which reads a query and a passage together and is the teacher of the cascade."""
    report_steps: Positive = 100
    """Interval, in steps, at which progress is reported."""
    pools: PoolsConfig = PoolsConfig(cluster="threads")
    """Place of the training: a thread of this process, or a worker of a Ray cluster. On a GPU, the results are not
    bit-identical."""

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return the part of the configuration on which results depend. Training continues only if it is unchanged.

        `recorded` is the recorded configuration if the training had already started; paths keep the names that they
        have there.
        """
        names = PathNames(self, recorded)
        identity = self.model_dump(mode="json", exclude={"name", "store", "report_steps", "pools"}, context=names)
        return self.normalize({**identity, "threads": self.pools.threads})

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a recorded identity without the keys whose value means "as before the key existed"."""
        return encode_recorded(recorded, self)
