"""Generator of docs/commands.md and of the table of commands in README.md, which `make docs` runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cyclopts import App

from rheostat.flows.cli.app import GROUPS, app
from rheostat.infra.terminal import command_names

README: Final = Path(__file__).resolve().parents[2] / "README.md"
PAGE: Final = README.parent / "docs/commands.md"
"""Path of the documentation page that lists all commands and their options."""
SHOWN: Final = (
    "init",
    "train",
    "sweep",
    "show",
    "watch",
    "report",
    "compare",
    "retrain",
    "rollback",
    "verify",
    "rescore",
    "server",
)
"""Commands that the table in README.md lists. The other commands are only in docs/commands.md."""
BEGIN, END = "<!-- commands: written by `make docs` -->\n", "<!-- end of commands -->\n"


def commands_of(app: App, *words: str) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield every command of an app, with the words that a user types to call the command. A command with actions, such
    as `engine`, is replaced by its actions. `words` are the words before the names of the commands."""
    for name in command_names(app):
        actions = command_names(app[name])
        yield from commands_of(app[name], *words, name) if actions else [((*words, name), app[name])]


def replace_table(page: str) -> str:
    """Return the text of README.md with the table of commands brought up to date. `page` is the current text."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    titles = {function.__name__: title for title, commands in GROUPS for function, _ in commands}
    rows = [_build_row(titles[words[0]], words, command) for words, command in commands_of(app()) if words[0] in SHOWN]
    return f"{before}{BEGIN}| group | command | what it does |\n|---|---|---|\n{''.join(rows)}{END}{after}"


def reference() -> str:
    """Build the text of docs/commands.md, which describes every command with its arguments, options and defaults."""
    page = app().generate_docs(output_format="markdown", recursive=True)
    page = re.sub(r"(?m)^(rheostat .*?) -m [\w.]+", r"\1", page)  # cyclopts adds the module that `python -m` runs
    return page.replace("# rheostat\n", "# Commands\n", 1)


def _build_row(group: str, words: tuple[str, ...], command: App) -> str:
    """Return the Markdown row of a command for the table in README.md: the heading of its group, the words that a user
    types, and a summary."""
    required = [argument for argument in command.assemble_argument_collection() if argument.required]
    typed = [*words, *(f"{a.name} {a.parameter.metavar}" if a.name[:1] == "-" else a.name for a in required)]
    summary = command.help.splitlines()[0].removesuffix(".")
    return f"| {group} | `rheostat {' '.join(typed)}` | {summary[:1].lower()}{summary[1:]} |\n"


if __name__ == "__main__":
    README.write_text(replace_table(README.read_text()))
    PAGE.write_text(reference())
