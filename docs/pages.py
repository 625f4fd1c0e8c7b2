"""Pages of the site that are made while it is built: the home page, contributing, and a page for every public module.

mkdocs-gen-files runs this file; mkdocstrings reads the modules as text, so nothing of Rheostat is imported.
"""

import ast
from pathlib import Path

import mkdocs_gen_files

HOME = Path(__file__).parent.parent
PACKAGES = {
    "flows": "What happens, in which order; the command line",
    "tasks": "One durable step of a stage each",
    "models": "The reinforcement learning library, which knows no Prefect",
    "placement": "Who gets which shards and workers",
    "infra": "The outside world: storage, shards, runs, Ray pools, errors",
}
COPIES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages that GitHub shows at the top of the repository, and their names in the site."""


def copy_page(name: str) -> None:
    """Take a page of the repository's top level into the site, links included."""
    text = (HOME / name).read_text().replace("](docs/", "](")
    for page, copy in COPIES.items():
        text = text.replace(f"]({page}", f"]({copy}")
    with mkdocs_gen_files.open(COPIES[name], "w") as file:
        file.write(text)


def is_public(module: Path) -> bool:
    """Say whether a module can be imported by its path, of which no part is private."""
    packages = [HOME / folder for folder in module.parents if folder.name]
    names = module.with_suffix("").parts
    public = all(name.isidentifier() and (name == "__init__" or not name.startswith("_")) for name in names)
    return public and all((package / "__init__.py").is_file() for package in packages)


def purpose(module: Path) -> str:
    """Read the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse((HOME / module).read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".")


def contents(package: Path) -> str:
    """List what a package holds, each with its purpose, its own packages last."""
    modules = [path.relative_to(HOME) for path in sorted((HOME / package).glob("*.py")) if path.stem != "__init__"]
    inner = [path.relative_to(HOME) for path in sorted((HOME / package).glob("*/__init__.py"))]
    links = [
        *((f"{path.stem}.md", path.stem, path) for path in modules),
        *((f"{path.parent.name}/index.md", f"{path.parent.name}/", path) for path in inner),
    ]
    rows = [f"| [`{name}`]({link}) | {purpose(path)} |\n" for link, name, path in links if is_public(path)]
    return "".join(["\n| module | what it is |\n|---|---|\n", *rows]) if rows else ""


def write_module_pages() -> None:
    """Write one page per public module that asks mkdocstrings for its docstrings, and the navigation between them."""
    navigation = mkdocs_gen_files.Nav()
    for package in PACKAGES:
        for path in sorted((HOME / package).rglob("*.py")):
            module = path.relative_to(HOME)
            if not is_public(module):
                continue
            parts = module.with_suffix("").parts
            if is_package := parts[-1] == "__init__":
                parts = parts[:-1]
            page = module.with_name("index.md") if is_package else module.with_suffix(".md")
            navigation[parts] = page.as_posix()
            name = ".".join(("rheostat", *parts))
            with mkdocs_gen_files.open(f"api/{page.as_posix()}", "w") as file:
                file.write(f"# `{name}`\n\n::: {name}\n{contents(module.parent) if is_package else ''}")
    with mkdocs_gen_files.open("api/index.md", "w") as file:
        file.write("# Modules\n\n::: rheostat\n    options: { members: false }\n\n")
        file.write("| package | what it is |\n|---|---|\n")
        file.writelines(
            f"| [`rheostat.{package}`]({package}/index.md) | {what} |\n" for package, what in PACKAGES.items()
        )
    with mkdocs_gen_files.open("api/SUMMARY.md", "w") as file:
        file.writelines(["* [Modules](index.md)\n", *navigation.build_literate_nav()])


for name in COPIES:
    copy_page(name)
write_module_pages()
