"""Configuration of `rheostat retriever`: pairs, the encoders, and how the dual encoder learns. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from infra.config import PoolsConfig, Positive, Settings, omit_unchanged_keys
from infra.store.inputs import Location, PathNames
from infra.variants import Variant

RETRIEVERS: Final = "retrievers"
"""Folder of a store in which retrievers lie beside the runs."""

Terms = Literal["dual", "self-distillation", "cascade"]


class PairSource(Variant):
    """What all sources share. `implementation` is a `models.retrieval.pairs.MakesPairs`."""


class TemplatedPairs(PairSource):
    """Facts with five attributes made from a seed, and queries that spell four of them by synonyms."""

    implementation = "models.retrieval.pairs:templated_pairs"

    kind: Literal["templated"] = "templated"
    facts: Annotated[int, Field(ge=100, le=20_000)] = 2000
    """Passages; a query is asked about each."""


class PairFile(PairSource):
    """Pairs from a file of JSON, CSV, Parquet or Arrow; the passages of all rows are what is searched."""

    implementation = "models.retrieval.pairs:file_pairs"

    kind: Literal["file"] = "file"
    path: Location
    """Training pairs: .jsonl, .json with an array, .csv, each of them also .gz, .parquet or .arrow."""
    heldout_path: Location | None = None
    """Pairs to measure with; none keeps `heldout_fraction` of the training file back."""
    query_column: str = "query"
    """Column with the query."""
    passage_column: str = "passage"
    """Column with the passage that answers it."""
    negatives_column: str | None = None
    """Column with a list of passages that do not, though they look alike; none draws others at random."""


class EncoderConfig(Settings):
    """An encoder and its training."""

    path: Location | None = None
    """Directory that it begins as, of a model in Hugging Face format or of sentence-transformers; none builds a small
    BERT from nothing, with a tokenizer of the pairs."""
    hidden_size: Positive = 64
    """Width of what is built, a multiple of its heads; the embedding has as many numbers."""
    layers: Positive = 2
    """Transformer layers of what is built."""
    heads: Positive = 4
    """Attention heads of what is built."""
    vocab_size: Annotated[int, Field(ge=512)] = 4096
    """Most tokens of its tokenizer."""
    steps: Positive = 600
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=2)] = 32
    """Queries per step; each is compared with the passages of all."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; linear over 10% of the steps, then linear to 0. Pretrained encoders take 2e-5."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size}: expected a multiple of heads {self.heads}")
        return self


class RetrieverConfig(Settings):
    """Everything that a retriever is made from."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "retriever"
    """Name in the store, below `retrievers/`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root of every random choice."""
    store: str = "./runs"
    """Where it lies: a directory, a file:// URI, or s3://bucket/prefix."""
    pairs: Annotated[TemplatedPairs | PairFile, Field(discriminator="kind")] = TemplatedPairs()
    """What it learns from, and what it is measured on."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for measuring where there is no file of them, chosen by a hash of the passage."""
    method: Literal["checked", "dual", "self-distillation", "cascade"] = "checked"
    """Terms of the loss: `dual` has the dual encoder's alone, `self-distillation` also those of late interaction,
    `cascade` also those of a cross-encoder; `checked` has these where its held-out MRR is higher than the student's."""
    max_tokens: Annotated[int, Field(ge=8)] = 64
    """Longest text; a longer one loses its end. A query and a passage together have twice as many."""
    negatives: Annotated[int, Field(ge=0, le=64)] = 3
    """Hard negatives per query and step, beside the passages of the batch's other queries."""
    encoder: EncoderConfig = EncoderConfig()
    """The dual encoder: one encoder for queries and passages."""
    cross_encoder: EncoderConfig = EncoderConfig(steps=1200)
    """The teacher of the cascade, which reads a query and a passage at once."""
    report_steps: Positive = 100
    """Steps after which progress is told."""
    pools: PoolsConfig = PoolsConfig(cluster="threads")
    """Where it is trained: in a thread of this process, or in one of a Ray cluster; on a GPU, its bits vary."""

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return what results depend on: training continues only under the same identity.

        Paths have the names that the record has for them; `recorded` is its configuration, if training was begun.
        """
        names = PathNames(self, recorded)
        identity = self.model_dump(mode="json", exclude={"name", "store", "report_steps", "pools"}, context=names)
        return self.normalize({**identity, "threads": self.pools.threads})

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a recorded identity without the keys that mean "as before they existed"."""
        return omit_unchanged_keys(recorded, self)
