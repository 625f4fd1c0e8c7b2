"""Rules of the repository: layers, sizes, words, generated pages, bundled configurations."""

import ast
import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from rheostat.infra.trackers.config import Tracker
from rheostat.infra.variants import Variant
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.corrections import Correction
from rheostat.models.config.data import DataSource
from rheostat.models.config.denoising import Sampler
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.judges import ServedModel
from rheostat.models.config.policy import PolicySource
from rheostat.models.config.policy_losses import PolicyLoss
from rheostat.models.config.preferences import Preferences
from rheostat.models.config.reward_terms import RewardTerm
from rheostat.models.config.teachers import Teacher
from rheostat.tasks.config.reference import reference

HOME = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "models", "placement", "infra")
SOURCES = sorted(path for room in ROOMS for path in (HOME / room).rglob("*.py"))
ELSEWHERE = {HOME / "models/engines/vllm/plugin", HOME / "models/agents/plugin"}
"""Folders of modules that run in other environments and share no name with the packages."""
VARIANTS = (
    Algorithm,
    Correction,
    DataSource,
    EngineSettings,
    PolicyLoss,
    PolicySource,
    Preferences,
    RewardTerm,
    Sampler,
    ServedModel,
    Teacher,
    Tracker,
)
TRACKED = subprocess.run(["git", "ls-files"], cwd=HOME, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def copies():
    """Folder with the package rheostat as hard links, because grimp does not follow symbolic links."""
    folder = HOME / "build/house"
    subprocess.run([HOME / ".ci/package.sh", "copies", folder], check=True)
    return folder


def test_imports_follow_the_layers_of_the_packages(copies):
    lint = [Path(sys.executable).with_name("lint-imports"), "--config", HOME / "pyproject.toml"]
    checked = subprocess.run(lint, cwd=copies, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_no_file_names_rheostats_modules_without_the_package():
    """An import of `models.config` would load a second copy of the module if the checkout is on the module path."""
    rooms = f"({'|'.join(ROOMS)})"
    former = re.compile(rf"^\s*(?:>>> |\.\.\. |\")?\s*(?:from|import) {rooms}(?=[.\s])|-m {rooms}\.", re.MULTILINE)
    kept = {"docs/upgrading.md", "CHANGELOG.md", "tests/unit/infra/test_former_names.py"}  # on the former names
    kinds = (".py", ".md", ".ipynb", ".sh", ".toml", "Makefile")
    pages = {name: (HOME / name).read_text() for name in TRACKED if name.endswith(kinds) and name not in kept}
    assert [(name, line.group(0)) for name, page in pages.items() for line in former.finditer(page)] == []


def test_the_command_line_imports_every_module_of_rheostat_by_one_name():
    code = (
        "import pkgutil, sys\nfrom importlib import import_module\nimport rheostat.flows.cli\n"
        "for module in pkgutil.iter_modules(rheostat.flows.cli.__path__, 'rheostat.flows.cli.'):\n"
        "    import_module(module.name)\n"
        f"print({{name.partition('.')[0] for name in sys.modules}} & {{*{ROOMS}}})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_configuration_page_is_up_to_date():
    assert (HOME / "docs/configuration.md").read_text() == reference(), "run `make docs`"


def test_every_table_of_the_configuration_is_printed_once_and_links_to_tables_are_valid():
    page = reference()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(set(titles)) == len(titles)
    vllm = page.split("## `[rollout.engine]` with `kind` `vllm`")[1].split("\n## ")[0]
    places = "`[scoring.rewards.model.engine]`, `[evaluations.rewards.model.engine]`"
    assert f"\nThe same table can be used at {places}.\n" in vllm
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\(#([^)]+)\)", page)) == anchors - {"top-level"}


@pytest.fixture(scope="module")
def graph(copies):
    """Modules that each module of the packages imports, including imports for types only."""
    code = (
        "import json, grimp\ngraph = grimp.build_graph('rheostat', cache_dir=None)\n"
        "print(json.dumps({each: sorted(graph.find_modules_directly_imported_by(each)) for each in graph.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=copies, capture_output=True, text=True, check=True)
    imports = {importer: set(imported) for importer, imported in json.loads(done.stdout).items()}
    assert len(imports) > 500
    return imports


def folder(module):
    """Return the folder of a module."""
    path = HOME.joinpath(*module.split(".")[1:])
    return path if path.is_dir() else path.parent


def test_no_two_folders_import_each_other(graph):
    ways = {
        (folder(importer), folder(imported)) for importer in graph.keys() - {"rheostat"} for imported in graph[importer]
    }
    both = {(here, there) for here, there in ways if here < there and (there, here) in ways}
    assert both == set()


def test_no_modules_import_each_other_in_a_circle(graph):
    """Imports for types only count too. No circle is allowed, not even of two modules."""
    TopologicalSorter({module: imported - {module} for module, imported in graph.items()}).prepare()


def test_a_public_class_name_has_one_meaning():
    texts = [path.read_text() for path in SOURCES if not ELSEWHERE & {*path.parents}]
    names = [name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE)]
    assert [name for name, count in Counter(names).items() if count > 1 and not name.startswith("_")] == []


def test_one_file_opens_images_and_converts_them_to_rgb():
    """Engines, trainer, rewards and reports read other pixels as soon as one of them decodes images itself."""
    decoding = re.compile(r"Image\.open\(|\.convert\(\s*[\"']RGB|exif_transpose")
    decoder = HOME / "models/vision/color_conversion.py"
    found = [path.relative_to(HOME) for path in SOURCES if path != decoder and decoding.search(path.read_text())]
    assert [str(path) for path in found] == ["models/data/images.py"]  # it converts to check that this is possible


WRITE_RAW = {
    "infra/agent_runner.py": "an error of an agent, for its parent process",
    "flows/cli/passwords.py": "a password that Rheostat has generated",
    "infra/environments/find.py": "a program for another process",
    "infra/pools/forks.py": "messages about processes, in the log of a worker",
    "infra/processes/guard.py": "a process id and an error, for the process that started the guard",
    "infra/processes/sandbox.py": "a program for another process",
    "infra/store/file_digests.py": "JSON and an error, for the process that started this one",
    "models/engines/vllm/server.py": "a program for another process",
    "models/environments/python.py": "a program for the sandbox",
    "models/text/chats.py": "JSON, for the process that started this one",
    "tasks/config/reference.py": "the configuration page",
    "tasks/views/plots.py": "an image, for the process that started this one",
}
"""Modules that write to stdout or stderr without escaping control characters, with what they write."""


def test_text_of_others_reaches_the_terminal_only_with_control_characters_escaped():
    """Policies, rewards, servers and files can put control characters into any text."""
    raw = re.compile(r"std(out|err)(__)?\.(buffer\.)?write|os\.write\([12],|^ *print\(")
    lines = [
        (path, line) for path in SOURCES if not ELSEWHERE & {*path.parents} for line in path.read_text().splitlines()
    ]
    found = {path.relative_to(HOME) for path, line in lines if raw.search(line) and "make_visible" not in line}
    assert {str(path) for path in found} == {*WRITE_RAW}


def test_no_code_tests_the_class_of_a_variant():
    """Code may use only what a variant states about itself: an `isinstance` test would miss classes of users."""
    for base in VARIANTS:
        assert len(_below(base)) > 1
    variants = {variant.__name__ for variant in _below(Variant)}
    mentions = re.compile(rf"\b({'|'.join(variants)})\b")
    asked = []
    for path in (path for path in SOURCES if HOME / "models/config" not in path.parents):
        for node in ast.walk(ast.parse(text)) if mentions.search(text := path.read_text()) else ():
            test = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            parts = node.args[1:] if test else [node.cls] if isinstance(node, ast.MatchClass) else []
            names = {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
            asked += [f"{path.relative_to(HOME)}:{node.lineno}: {name}" for name in names & variants]
    assert asked == []


def _below(base: type[Variant]) -> list[type[Variant]]:
    return [found for child in base.__subclasses__() for found in (child, *_below(child))]


def test_small_modules_with_one_importer_give_a_warning(graph):
    """A warning only: such a module may belong into the module that imports it."""
    small = []
    for module in sorted(graph.keys() - {"rheostat"}):
        path = HOME.joinpath(*module.split(".")[1:]).with_suffix(".py")
        importers = [importer for importer, imported in graph.items() if module in imported]
        if path.exists() and len(importers) == 1 and len(path.read_text().splitlines()) < 60:
            small.append(f"{module} ({min(importers)})")
    if small:
        warnings.warn(f"fewer than 60 lines and one importer: {', '.join(small)}", stacklevel=1)


def test_no_test_module_imports_another():
    found = [
        f"{path.relative_to(HOME)}: {line}"
        for path in sorted((HOME / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.\S*\btest_", line)
    ]
    assert found == []


def test_a_file_that_has_grown_past_400_lines_gets_a_warning():
    """A long file is worth a look: it may have two meanings. It is no error."""
    for path in SOURCES:
        if (lines := len(path.read_text().splitlines())) > 400:
            warnings.warn(f"{path.relative_to(HOME)} has {lines} lines. Split it if it has two meanings", stacklevel=1)


def test_the_docs_of_the_prefect_api_name_every_function_of_prefect_that_is_replaced():
    marked = re.compile(
        r"^\s*\w+\.(\w+) = \w+  # type: ignore\[(?:method-assign|assignment|attr-defined)", re.MULTILINE
    )
    replaced = {name for path in (HOME / "flows").rglob("*.py") for name in marked.findall(path.read_text())}
    described = ast.get_docstring(ast.parse((HOME / "flows/cli/prefect_api.py").read_text()))
    assert len(replaced) == 3
    assert sorted(name for name in replaced if f"{name}`" not in described) == []


@pytest.mark.parametrize(
    "module",
    ["rheostat.flows.cli.app", "rheostat.tasks.config.run", "rheostat.tasks.views.runs", "rheostat.flows.cli.train"],
)
def test_starting_the_command_line_imports_neither_prefect_nor_torch(module):
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('prefect', 'torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def test_flows_and_tasks_load_without_torch():
    code = "import sys, rheostat.flows.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def test_links_between_pages_have_existing_targets():
    pages = [HOME / name for name in TRACKED if name.endswith(".md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_page_on_faults_names_existing_tests_and_only_runs_that_ended_as_expected():
    page = (HOME / "docs/faults.md").read_text()
    named = re.findall(r"`(tests/[^`]+)`", page)
    assert len(named) > 10
    assert [name for name in named if not (HOME / name).exists()] == []
    rows = re.findall(r"\| (\d+) \| (\d+) \| [\d.]+ \|$", page, re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if row[0] != row[1]] == []


def test_the_page_on_models_has_a_row_for_every_family_of_make_test_models():
    families = tomllib.loads((HOME / "tests/models/families.toml").read_text())
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", (HOME / "docs/models.md").read_text(), re.MULTILINE)
    assert [family for family, _ in rows if family != "model_type"] == [*families]
    refused = {family for family, keys in families.items() if "refused" in keys}
    assert [(family, result) for family, result in rows if result.startswith("refused") and family not in refused] == []


def test_no_machine_leaves_its_paths_in_the_repository():
    texts = [name for name in TRACKED if name.endswith((".py", ".md", ".toml", ".yaml", ".sh", "Makefile"))]
    outside = [name for name in texts if not name.startswith("tests/")]
    found = [name for name in outside if re.search(r"(?<![\w.])/(home|root|work|Users)/", (HOME / name).read_text())]
    assert found == []


def test_no_warning_begins_with_the_prefix_that_the_terminal_adds():
    doubled = re.compile(r"""\.warning\(\s*f?["']warning\b""")
    assert [str(path) for path in SOURCES if doubled.search(path.read_text())] == []


def test_no_file_contains_merge_conflict_markers():
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    files = [HOME / name for name in TRACKED]
    assert [str(file) for file in files if file.is_file() and marks.search(file.read_text(errors="replace"))] == []
