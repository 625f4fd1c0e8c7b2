"""Problems from several files, from which each iteration samples by weight."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rheostat.models.config.data import MixtureData
from rheostat.models.data.files import read_split, report_problems
from rheostat.models.data.image_files import image_files
from rheostat.models.data.problems import Problem
from rheostat.models.data.reading import ReadingReport


def mixed_problems(data: MixtureData, split: str, seed: int) -> list[Problem]:
    """Return the problems of a split ("train" or "heldout") from all files of a mixture. The `part` of a problem is the
    index of its file.

    Training problems are listed file after file; `rheostat.models.data.curriculum` mixes them. Held-out problems are
    interleaved by the Sainte-Laguë method: problem i of a file with weight w, counted from 0, is placed at (i + 1/2) /
    w. An evaluation uses the first n held-out problems, so these represent the weights as closely as whole numbers
    allow, until a file has no problems left.
    """
    files = [
        [replace(problem, part=part) for problem in read_split(source, split, data.drop)]
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


def report_mixture(data: MixtureData, split: str) -> ReadingReport:
    """Report how each file of a mixture is read for a split."""
    report = ReadingReport()
    for source in data.sources:
        report += report_problems(source, split, data.drop)
    return report


def mixed_image_files(data: MixtureData) -> Iterator[Path]:
    """Yield the path of each image file that the rows of the mixture's files name."""
    for source in data.sources:
        yield from image_files(source)
