"""The house itself: layers, sizes, words, generated pages, configurations that ship."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config.reference import reference

HOME = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "models", "placement", "infra")
SOURCES = sorted(path for room in ROOMS for path in (HOME / room).rglob("*.py"))
TRACKED = subprocess.run(["git", "ls-files"], cwd=HOME, capture_output=True, text=True, check=True).stdout.split()


def test_imports_go_down_the_rooms_only():
    lint = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run([lint], cwd=HOME, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_configuration_page_is_the_one_that_the_models_generate():
    assert (HOME / "docs/configuration.md").read_text() == reference(), "run `make docs`"


def test_no_file_has_grown_past_400_lines():
    assert [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 400] == []


@pytest.mark.parametrize("module", ["flows.cli.app", "tasks.config.run", "tasks.views.runs", "flows.cli.train"])
def test_what_the_command_line_needs_to_start_loads_neither_prefect_nor_torch(module):
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('prefect', 'torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def test_flows_and_tasks_load_without_torch():
    code = "import sys, flows.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def test_links_between_pages_lead_somewhere():
    pages = [HOME / name for name in TRACKED if name.endswith(".md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_no_machine_leaves_its_paths_in_the_repository():
    texts = [name for name in TRACKED if name.endswith((".py", ".md", ".toml", ".yaml", ".sh", "Makefile"))]
    outside = [name for name in texts if not name.startswith("tests/")]
    found = [name for name in outside if re.search(r"(?<![\w.])/(home|root|work|Users)/", (HOME / name).read_text())]
    assert found == []
