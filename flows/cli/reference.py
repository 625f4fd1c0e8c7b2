"""Generator of the table of commands in README.md, which `make docs` runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cyclopts import App

from flows.cli.app import app
from infra.terminal import command_names

README: Final = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- commands: written by `make docs` -->\n", "<!-- end of commands -->\n"


def commands_of(app: App, *words: str) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield every command with the words that call it. A command with actions is replaced by its actions."""
    for name in command_names(app):
        actions = command_names(app[name])
        yield from commands_of(app[name], *words, name) if actions else [((*words, name), app[name])]


def replace_table(page: str) -> str:
    """Return the page with a new table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [_build_row(words, command) for words, command in commands_of(app())]
    return f"{before}{BEGIN}| command | what it does |\n|---|---|\n{''.join(rows)}{END}{after}"


def _build_row(words: tuple[str, ...], command: App) -> str:
    """Return the table row of a command: the words to type and its summary."""
    required = [argument for argument in command.assemble_argument_collection() if argument.required]
    typed = [*words, *(f"{a.name} {a.parameter.metavar}" if a.name[:1] == "-" else a.name for a in required)]
    summary = command.help.splitlines()[0].removesuffix(".")
    return f"| `rheostat {' '.join(typed)}` | {summary[:1].lower()}{summary[1:]} |\n"


if __name__ == "__main__":
    README.write_text(replace_table(README.read_text()))
