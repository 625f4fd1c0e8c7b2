"""Configuration of the rules by which files of problems and preferences are read. Torch-free."""

from typing import Annotated, Literal

from infra.config import Settings, Since


class FileRules(Settings):
    """Rules by which the rows of a file are read and split."""

    version: Annotated[Literal[1, 2], Since("0.2.0", before=1)] = 2
    """Version of the rules for reading. In 2, the split is independent of the file format, of letter case, white space
    and Unicode normalization, numeric answers are written without exponents, and repeated keys or columns and answers
    that are NaN or infinite are refused. 1 is used by runs that began before this key."""
