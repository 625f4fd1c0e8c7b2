"""Problems of several files, from which iterations draw by weight."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from models.config.data import MixtureData
from models.data.files import file_problems
from models.data.image_files import image_files
from models.data.problems import Problem


def mixed_problems(data: MixtureData, split: str, seed: int) -> list[Problem]:
    """Read the split's problems of every file, in file order; each says which file it is of.

    Those to learn from come file after file: `models.data.curriculum` mixes them. Held-out problems are in the order of
    Sainte-Laguë: the i-th of a file with weight w, counted from 0, comes at (i + 1/2) / w, so that the first n of all,
    which an evaluation asks, have each file's share as nearly as whole numbers can, until a file has no more.
    """
    files = [
        [replace(problem, part=part) for problem in file_problems(source, split, seed)]
        for part, source in enumerate(data.sources)
    ]
    if split == "train":
        return [problem for file in files for problem in file]
    placed = [
        ((place + 0.5) / source.weight, problem.part, problem)
        for source, file in zip(data.sources, files, strict=True)
        for place, problem in enumerate(file)
    ]
    return [problem for *_, problem in sorted(placed, key=lambda each: each[:2])]


def mixed_image_files(data: MixtureData) -> Iterator[Path]:
    """Name the image files that rows of the files name."""
    for source in data.sources:
        yield from image_files(source)
