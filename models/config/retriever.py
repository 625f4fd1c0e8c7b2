"""Configuration of `rheostat retriever`: pairs of queries and passages, encoders, and the training of the dual encoder.
Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rheostat.infra.config import PoolsConfig, Positive, Settings, encode_recorded
from rheostat.infra.store.inputs import DataLocation, ModelLocation, PathNames
from rheostat.infra.variants import Variant
from rheostat.models.config.file_rules import FileRules
from rheostat.models.config.hub_datasets import HubDatasetChoice

RETRIEVERS: Final = "retrievers"
"""Name of the folder in a store that contains the trained retrievers, next to the runs."""

Terms = Literal["dual", "self-distillation", "cascade"]


class PairSource(Variant):
    """Fields common to all sources of training pairs for a retriever (a query, and a passage that answers it).
    `implementation` names a `rheostat.models.retrieval.pairs.PairFactory`."""


class TemplatedPairs(PairSource):
    """Pairs generated from a seed. Each passage describes a fact with five attributes, and its query mentions four of
    these attributes by synonyms."""

    implementation = "rheostat.models.retrieval.pairs:templated_pairs"

    kind: Literal["templated"] = "templated"
    facts: Annotated[int, Field(ge=100, le=20_000)] = 2000
    """Number of generated facts. Each fact is one passage and has one query."""


class PairFile(HubDatasetChoice, FileRules, PairSource):
    """Pairs from a JSON, CSV, Parquet or Arrow file. The passages of all rows are the corpus in which the retriever
    searches."""

    implementation = "rheostat.models.retrieval.pairs:file_pairs"

    kind: Literal["file"] = "file"
    path: DataLocation
    """File of training pairs, or a dataset on the Hugging Face Hub: .jsonl, .json with an array, .csv or
    .tsv (each also compressed as .gz or .zst), .parquet, .arrow or .feather."""
    heldout_path: DataLocation | None = None
    """File of pairs for the evaluation. If not set, `heldout_fraction` of the training file is kept for evaluation."""
    query_column: str = "query"
    """Column with the query of a pair."""
    passage_column: str = "passage"
    """Column with the passage that answers the query."""
    negatives_column: str | None = None
    """Column with a list of passages that are similar but do not answer the query (hard negatives). If not set, random
    other passages are used as negatives."""


class EncoderConfig(Settings):
    """Settings for a text encoder of the retriever and for its training."""

    path: ModelLocation | None = None
    """Directory, or name on the Hugging Face Hub, of the initial model in Hugging Face or sentence-transformers format.
    If not set, a small BERT with random weights is built, with a tokenizer trained on the pairs."""
    hidden_size: Positive = 64
    """Hidden size of a new encoder, and so the size of its embeddings. Must be a multiple of `heads`."""
    layers: Positive = 2
    """Number of transformer layers of a new encoder."""
    heads: Positive = 4
    """Number of attention heads of a new encoder."""
    vocab_size: Annotated[int, Field(ge=512)] = 4096
    """Maximum number of tokens in the vocabulary of a new encoder's tokenizer."""
    steps: Positive = 600
    """Number of optimizer steps."""
    batch_size: Annotated[int, Field(ge=2)] = 32
    """Number of queries per optimizer step. Each query is compared with the passages of all queries in the batch."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate. The rate rises linearly over the first 10% of the steps, then falls linearly to 0. Use 2e-5
    for pretrained encoders."""

    @model_validator(mode="after")
    def _require_divisible_heads(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}. Change "
                "one of them"
            )
        return self


class RetrieverConfig(Settings):
    """Complete configuration of `rheostat retriever`, which trains a model that searches passages for a query."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "retriever"
    """Name of the retriever, which is stored below `retrievers/` in the store."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed from which all random choices are derived."""
    store: str = "./runs"
    """Store in which the retriever is saved: a directory, a file:// URI, s3://bucket/prefix or
    az://container/prefix."""
    pairs: Annotated[TemplatedPairs | PairFile, Field(discriminator="kind")] = TemplatedPairs()
    """Source of the pairs for training and evaluation."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for the evaluation if `pairs.heldout_path` is not set. A hash of the passage selects the
    pairs."""
    method: Literal["checked", "dual", "self-distillation", "cascade"] = "checked"
    """Training method. `dual` trains the dual encoder alone. `self-distillation` adds a teacher that compares texts
    token by token (late interaction). `cascade` adds a cross-encoder as a second teacher. `checked` uses the
    cross-encoder as a teacher only if its held-out MRR (mean reciprocal rank) is higher than that of the dual
    encoder."""
    max_tokens: Annotated[int, Field(ge=8)] = 64
    """Maximum length of a query or passage in tokens. Longer texts are truncated. The cross-encoder reads a query and a
    passage together, with up to twice this length."""
    negatives: Annotated[int, Field(ge=0, le=64)] = 3
    """Number of hard negatives for each query in a step. The passages of the other queries in the batch are negatives
    too."""
    encoder: EncoderConfig = EncoderConfig()
    """Dual encoder, which encodes queries and passages separately with the same weights."""
    cross_encoder: EncoderConfig = EncoderConfig(steps=1200)
    """Cross-encoder, which reads a query and a passage together. It is the teacher of the dual encoder with `method`
    "cascade" and, if it is better than the dual encoder, "checked"."""
    report_steps: Positive = 100
    """Interval, in optimizer steps, at which progress is reported."""
    pools: PoolsConfig = PoolsConfig(cluster="threads")
    """Workers for the training: "threads" trains in a thread of this process, other clusters in a Ray worker. Trainings
    on a GPU that are run again are not bit-identical."""

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return the part of the configuration on which the trained model depends. An interrupted training can only be
        resumed if this part is unchanged.

        `recorded` is the configuration stored when the training began, or None for a new training. Paths that still
        name the same files keep their recorded spelling.
        """
        names = PathNames(self, recorded)
        identity = self.model_dump(mode="json", exclude={"name", "store", "report_steps", "pools"}, context=names)
        return self.normalize({**identity, "threads": self.pools.threads})

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a recorded identity (see `identity`) in the form in which this version records it. Keys that only say
        "as before the key existed" are omitted."""
        return encode_recorded(recorded, self)
