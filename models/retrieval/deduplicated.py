"""Training problems without near-duplicates of held-out problems, as found by a retriever.

Shapes: N training problems, H held-out problems, D dimensions of an embedding.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

import numpy as np

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target
from rheostat.models.config.data import DeduplicatedData, FileData, MixtureData
from rheostat.models.data.problems import Problem, identity, load_problems
from rheostat.models.data.reading import ReadingReport, report_reading
from rheostat.models.retrieval.encoders import Retriever

WHERE: Final = "data.retriever"


def deduplicated_problems(data: DeduplicatedData, split: str, seed: int) -> list[Problem]:
    """Read the problems of a split ("train" or "heldout"). Training problems that nearly repeat a held-out problem are
    removed.

    Raises BadInput if no training problem is left.
    """
    problems = load_problems(_find_source(data), split, seed)
    if split == "heldout":
        return problems
    dropped = near_duplicates(data, seed)
    remaining = [problem for problem in problems if problem.source not in dropped]
    if not remaining:
        raise BadInput(
            f"data.similarity is {data.similarity:g}, at which every training problem ({len(problems):,}) is "
            "a near-duplicate of a held-out problem and would be removed. Raise data.similarity."
        )
    return remaining


def _find_source(data: DeduplicatedData) -> FileData | MixtureData:
    """Return the settings of the data source whose problems are deduplicated, with the settings for images and dropped
    rows copied from `data`."""
    return data.source.model_copy(
        update={"image_background": data.image_background, "image_version": data.image_version, "drop": data.drop}
    )


def near_duplicates(data: DeduplicatedData, seed: int) -> dict[str, str]:
    """Find the training problems that must be removed, because their cosine similarity to a held-out problem is at
    least `data.similarity`.

    Returns a dict from the origin of each such training problem to a text that names the most similar held-out problem
    and the cosine.
    """
    train, heldout = (load_problems(_find_source(data), split, seed) for split in ("train", "heldout"))
    retriever = Retriever(data.retriever, WHERE)
    train_ND, heldout_HD = (retriever.embed([identity(each.prompt) for each in part]) for part in (train, heldout))
    duplicates = {}
    for problem, vector_D in zip(train, train_ND, strict=True):
        cosine_H = heldout_HD @ vector_D
        nearest = int(np.argmax(cosine_H))
        if cosine_H[nearest] >= data.similarity:
            duplicates[problem.source] = f"is near {heldout[nearest].source}, cosine {cosine_H[nearest]:.3f}"
    return duplicates


def report_source(data: DeduplicatedData, split: str) -> ReadingReport:
    """Report how the files of the data source are read, before near-duplicates are removed."""
    return report_reading(_find_source(data), split)


def find_referenced_images(data: DeduplicatedData) -> Iterator[Path]:
    """Yield the paths of the image files that rows in the data source's files refer to."""
    if data.source.referenced_files:
        yield from cast(Callable[[object], Iterator[Path]], find_target(data.source.referenced_files, where="data"))(
            data.source
        )
