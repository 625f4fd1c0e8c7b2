"""Pairs of queries and passages: made from a template, or read from a file."""

import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np

from infra.config import Settings
from infra.errors import BadInput, Complaints
from infra.variants import implementation_of
from models.config.retriever import PairFile, RetrieverConfig, TemplatedPairs
from models.data.files import read_rows, text_of
from models.data.problems import is_heldout
from models.records.seeds import derive_seed


class Pair(Settings):
    """A query, the passage that answers it, and passages that do not though they look alike."""

    query: str
    passage: str
    negatives: tuple[str, ...] = ()


class PairSet(Settings):
    """What a retriever learns from, and what it is measured on."""

    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]

    @property
    def passages(self) -> tuple[str, ...]:
        """All that is searched, each once, in order."""
        pairs = (*self.train, *self.heldout)
        return tuple(dict.fromkeys(text for pair in pairs for text in (pair.passage, *pair.negatives)))


class MakesPairs(Protocol):
    """Makes or reads pairs; the same arguments give the same ones."""

    def __call__(self, source: Any, seed: int, fraction: float, /) -> PairSet:  # noqa: ANN401 -- its own settings
        """`fraction` of the passages are held out, where the source does not say which."""
        ...


def load_pairs(config: RetrieverConfig) -> PairSet:
    """Make or read the configured pairs. Raises BadInput where there is nothing to learn from, or to measure with."""
    found = cast(MakesPairs, implementation_of(config.pairs))(config.pairs, config.seed, config.heldout_fraction)
    for split, pairs in (("training", found.train), ("held-out", found.heldout)):
        if len(pairs) < config.encoder.batch_size and (split == "training" or not pairs):
            needed = f"at least encoder.batch_size {config.encoder.batch_size}" if split == "training" else "some"
            raise BadInput(f"pairs: expected {needed} {split} pairs, found {len(pairs)}")
    return found


def _split(pairs: Sequence[Pair], fraction: float) -> PairSet:
    heldout = [is_heldout(pair.passage, fraction) for pair in pairs]
    return PairSet(
        train=tuple(pair for pair, held in zip(pairs, heldout, strict=True) if not held),
        heldout=tuple(pair for pair, held in zip(pairs, heldout, strict=True) if held),
    )


# ---- files
def file_pairs(source: PairFile, seed: int, fraction: float) -> PairSet:
    """Read the pairs in file order."""
    if source.heldout_path is None:
        return _split(_read(source.path, source), fraction)
    return PairSet(train=_read(source.path, source), heldout=_read(source.heldout_path, source))


def _read(path: Path, source: PairFile) -> tuple[Pair, ...]:
    columns = [source.query_column, source.passage_column, *filter(None, [source.negatives_column])]
    pairs, complaints = list[Pair](), Complaints()
    for place, row in read_rows(path, columns, complaints):
        with complaints.kept(place):
            query, passage = (text_of(place, row[column], column) for column in columns[:2])
            pairs.append(Pair(query=query, passage=passage, negatives=_negatives(place, row, columns[2:])))
    complaints.check()
    if not pairs:
        raise BadInput(f"{path}: no pairs, the file is empty")
    return tuple(pairs)


def _negatives(place: str, row: Mapping[str, object], columns: Sequence[str]) -> tuple[str, ...]:
    found = [row[column] for column in columns]
    if not all(isinstance(each, list) for each in found):
        raise BadInput(f"{place}: {columns[0]}: expected a list of texts, found {found[0]!r:.60}")
    listed = [(f"{column}[{number}]", each) for column in columns for number, each in enumerate(row[column])]  # type: ignore[arg-type, var-annotated]
    return tuple(text_of(place, each, name) for name, each in listed)


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
"""Of each attribute its values; of each value the word of passages, and what queries call it."""
SHARED: Final = 3
"""Attributes that a hard negative has in common with the fact, at least."""
MOST_NEGATIVES: Final = 16


def templated_pairs(source: TemplatedPairs, seed: int, fraction: float) -> PairSet:
    """Draw facts, and for each a query that leaves one attribute out and spells the others by synonyms.

    Facts that have all that the query asks are no negatives, but stand in the way where the query is measured.
    """
    rng = random.Random(derive_seed("pairs", seed))
    facts_FA = np.array(rng.sample([*product(*(range(len(values)) for values in WORDS))], source.facts))
    pairs = []
    for fact_A in facts_FA:
        left_out = rng.randrange(len(WORDS))
        asked = [place for place in range(len(WORDS)) if place != left_out]
        query = " ".join(rng.choice(WORDS[place][fact_A[place]][1:]) for place in asked)
        same_FA = facts_FA == fact_A
        alike = np.flatnonzero((same_FA.sum(1) >= SHARED) & ~same_FA[:, asked].all(1)).tolist()
        chosen = rng.sample(alike, min(len(alike), MOST_NEGATIVES))
        negatives = tuple(_told(facts_FA[other].tolist()) for other in chosen)
        pairs.append(Pair(query=query, passage=_told(fact_A.tolist()), negatives=negatives))
    return _split(pairs, fraction)


def _told(fact: Sequence[int]) -> str:
    return " ".join(WORDS[attribute][value][0] for attribute, value in enumerate(fact))
