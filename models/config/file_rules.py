"""Configuration of the rules for reading files of problems and preferences. Torch-free."""

from typing import Annotated, Literal

from infra.config import Settings, Since


class FileRules(Settings):
    """Rules for reading the rows of a file and splitting them into training and evaluation."""

    version: Annotated[Literal[1, 2], Since("0.2.0", before=1)] = 2
    """Version of the rules. In version 2, the split is independent of the file format, of letter case, white space and
    Unicode normalization; numeric answers are written without exponents; repeated keys or columns, and answers that are
    NaN or infinite, are refused. Runs that began before this key existed use version 1."""
