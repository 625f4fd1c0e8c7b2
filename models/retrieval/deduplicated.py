"""Problems without those to learn from that are nearly held-out ones, as a retriever sees it.

N training problems, H held-out ones.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

import numpy as np

from infra.errors import BadInput
from infra.plugins import find_target
from models.config.data import DeduplicatedData
from models.data.problems import Problem, identity, load_problems
from models.retrieval.encoders import Retriever

WHERE: Final = "data.retriever"


def deduplicated_problems(data: DeduplicatedData, split: str, seed: int) -> list[Problem]:
    """Read the split's problems; those to learn from without near duplicates. Raises BadInput where none is left."""
    problems = load_problems(data.source, split, seed)
    if split == "heldout":
        return problems
    dropped = near_duplicates(data, seed)
    kept = [problem for problem in problems if problem.source not in dropped]
    if not kept:
        raise BadInput(
            f"data.bound {data.bound:g}: every one of {len(problems)} training problems is near a held-out one"
        )
    return kept


def near_duplicates(data: DeduplicatedData, seed: int) -> dict[str, str]:
    """Say of each training problem that is left out which held-out problem is near, by where both came from."""
    train, heldout = (load_problems(data.source, split, seed) for split in ("train", "heldout"))
    retriever = Retriever(data.retriever, WHERE)
    train_ND, heldout_HD = (retriever.embed([identity(each.prompt) for each in part]) for part in (train, heldout))
    found = {}
    for problem, vector_D in zip(train, train_ND, strict=True):
        cosine_H = heldout_HD @ vector_D
        nearest = int(np.argmax(cosine_H))
        if cosine_H[nearest] >= data.bound:
            found[problem.source] = f"is near {heldout[nearest].source}, cosine {cosine_H[nearest]:.3f}"
    return found


def images_beside(data: DeduplicatedData) -> Iterator[Path]:
    """Name the image files that rows of the source's files name."""
    if data.source.beside:
        yield from cast(Callable[[object], Iterator[Path]], find_target(data.source.beside, where="data"))(data.source)
