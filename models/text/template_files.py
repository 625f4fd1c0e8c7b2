"""Files of additional named chat templates in a model directory, such as `additional_chat_templates/tool_use.jinja`."""

from pathlib import Path
from shutil import copyfile
from typing import Final

FOLDER: Final = "additional_chat_templates"
"""Folder in which transformers stores all templates of a tokenizer except `default`."""


def copy_named_templates(source: Path, target: Path) -> None:
    """Copy the named chat templates of a model directory, except those that the target directory already contains."""
    for path in sorted((source / FOLDER).glob("*.jinja")):
        copy = target / FOLDER / path.name
        if path.is_file() and not path.name.startswith(".") and not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            copyfile(path, copy)
