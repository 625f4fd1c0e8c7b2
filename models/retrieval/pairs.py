"""Pairs of queries and passages, generated from a template or read from a file."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.variants import implementation_of
from rheostat.models.config.retriever import PairFile, RetrieverConfig, TemplatedPairs
from rheostat.models.data.canonical import fold_text
from rheostat.models.data.messages import read_text
from rheostat.models.data.problems import is_heldout
from rheostat.models.data.rows import read_rows
from rheostat.models.records.seeds import derive_seed


class Pair(Settings):
    """Query with the passage that answers it, and with hard negatives: similar passages that do not answer the
    query."""

    query: str
    passage: str
    negatives: tuple[str, ...] = ()


class PairSet(Settings):
    """Training pairs and held-out pairs of a retriever."""

    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]

    @property
    def passages(self) -> tuple[str, ...]:
        """All distinct passages of the pairs in order, which form the corpus for searches."""
        pairs = (*self.train, *self.heldout)
        return tuple(dict.fromkeys(text for pair in pairs for text in (pair.passage, *pair.negatives)))


class PairFactory(Protocol):
    """Function that generates or reads pairs of query and passage. The same arguments give the same pairs."""

    def __call__(self, source: Any, seed: int, fraction: float, /) -> PairSet:  # noqa: ANN401 -- settings differ by kind
        """Return the pairs. `fraction` is the share of held-out passages if the source defines no split."""
        ...


def load_pairs(config: RetrieverConfig) -> PairSet:
    """Generate or read the configured pairs of query and passage. Raises BadInput if there are too few training pairs
    or no held-out pairs."""
    pair_set = cast(PairFactory, implementation_of(config.pairs))(config.pairs, config.seed, config.heldout_fraction)
    for split, pairs in (("training", pair_set.train), ("held-out", pair_set.heldout)):
        if len(pairs) < config.encoder.batch_size and (split == "training" or not pairs):
            needed = f"{config.encoder.batch_size} (encoder.batch_size)" if split == "training" else "one"
            raise BadInput(
                f"pairs: there are only {len(pairs)} {split} pairs, but at least {needed} are needed. Add pairs"
            )
    return pair_set


def _split(pairs: Sequence[Pair], fraction: float, *, key: Callable[[str], str] = str) -> PairSet:
    """Split pairs into training and held-out pairs by a hash of `key(passage)`. `fraction` is the share of held-out
    passages."""
    heldout = [is_heldout(key(pair.passage), fraction) for pair in pairs]
    return PairSet(
        train=tuple(pair for pair, is_held_out in zip(pairs, heldout, strict=True) if not is_held_out),
        heldout=tuple(pair for pair, is_held_out in zip(pairs, heldout, strict=True) if is_held_out),
    )


# ---- files
def file_pairs(source: PairFile, seed: int, fraction: float) -> PairSet:
    """Read pairs of query and passage from files, in file order. Raises BadInput if a row is invalid or a file has no
    pairs."""
    if source.heldout_path is None:
        return _split(_read(source.path, source), fraction, key=str if source.version == 1 else fold_text)
    return PairSet(train=_read(source.path, source), heldout=_read(source.heldout_path, source))


def _read(path: Path, source: PairFile) -> tuple[Pair, ...]:
    """Read all pairs of query and passage from one file. Raises BadInput if a row is invalid or the file has no
    pairs."""
    columns = [source.query_column, source.passage_column, *filter(None, [source.negatives_column])]
    pairs, input_errors = list[Pair](), InputErrors()
    for place, row in read_rows(path, columns, input_errors, version=source.version):
        with input_errors.collect(place):
            query, passage = (read_text(place, row[column], column) for column in columns[:2])
            pairs.append(Pair(query=query, passage=passage, negatives=_negatives(place, row, columns[2:])))
    input_errors.check()
    if not pairs:
        raise BadInput(
            f"{path}: the file is empty, but it must contain at least one pair. Check that the file was written "
            "completely."
        )
    return tuple(pairs)


def _negatives(place: str, row: Mapping[str, object], columns: Sequence[str]) -> tuple[str, ...]:
    """Return a row's hard negatives (similar passages that do not answer the query) from the given columns.

    Raises BadInput if a column's value is not a list of texts.
    """
    values = [row[column] for column in columns]
    if not all(isinstance(each, list) for each in values):
        raise BadInput(
            f"{place}: {columns[0]}: the value must be a list of texts, found {values[0]!r:.60}. Write it as a JSON "
            "list, or remove the row."
        )
    listed = [(f"{column}[{number}]", each) for column in columns for number, each in enumerate(row[column])]  # type: ignore[arg-type, var-annotated]
    return tuple(read_text(place, each, name) for name, each in listed)


# ---- templates
WORDS: Final = tuple(
    tuple(tuple(value.split("/")) for value in line.split())
    for line in (
        "red/crimson/scarlet blue/azure/navy green/emerald/lime white/ivory/snowy black/ebony/sable "
        "brown/chestnut/umber grey/ashen/silvery yellow/golden/amber",
        "dog/hound/canine cat/feline/tabby horse/steed/equine bird/fowl/songster snake/serpent/viper "
        "fish/swimmer/angler fox/vixen/reynard sheep/ewe/lamb",
        "forest/woods/jungle house/home/cottage river/stream/brook mountain/peak/summit field/meadow/pasture "
        "shore/beach/coast cave/grotto/cavern town/city/village",
        "sleeps/dozes/slumbers runs/races/sprints eats/dines/feeds plays/frolics/romps hides/lurks/cowers "
        "sings/chants/hums waits/lingers/tarries jumps/leaps/hops",
        "morning/dawn/sunrise noon/midday/lunchtime evening/dusk/sunset night/midnight/darkness winter/frost/snowfall "
        "summer/heat/sunshine spring/thaw/blossom autumn/harvest/leaffall",
    )
)
"""Attributes of generated facts. Each attribute has several values. The first word of a value is used in passages, and
its synonyms in queries."""
SHARED: Final = 3
"""Minimum number of attributes in which a hard negative must equal the fact of the query."""
MAX_NEGATIVES: Final = 16


def templated_pairs(source: TemplatedPairs, seed: int, fraction: float) -> PairSet:
    """Generate pairs from sampled facts. The passage states all attributes of a fact, and the query omits one attribute
    and names the others by synonyms.

    Other facts that also match the query are not used as negatives. They stay in the corpus, where they make the
    evaluation harder.
    """
    rng = random.Random(derive_seed("pairs", seed))
    facts_FA = np.array(rng.sample([*product(*(range(len(values)) for values in WORDS))], source.facts))
    pairs = []
    for fact_A in facts_FA:
        left_out = rng.randrange(len(WORDS))
        query_places = [place for place in range(len(WORDS)) if place != left_out]
        query = " ".join(rng.choice(WORDS[place][fact_A[place]][1:]) for place in query_places)
        same_FA = facts_FA == fact_A
        alike = np.flatnonzero((same_FA.sum(1) >= SHARED) & ~same_FA[:, query_places].all(1)).tolist()
        chosen = rng.sample(alike, min(len(alike), MAX_NEGATIVES))
        negatives = tuple(_write_passage(facts_FA[other].tolist()) for other in chosen)
        pairs.append(Pair(query=query, passage=_write_passage(fact_A.tolist()), negatives=negatives))
    return _split(pairs, fraction)


def _write_passage(fact: Sequence[int]) -> str:
    """Return the passage that states a fact. `fact` contains the index of the value of each attribute."""
    return " ".join(WORDS[attribute][value][0] for attribute, value in enumerate(fact))
