"""Use from Python: the notebook of docs/library.md runs unchanged in a separate kernel."""

import ast
import importlib

import nbformat
import pytest
from nbclient import NotebookClient

from rheostat.tasks.config.run import RunConfig
from tests.support.jobs import AUTH, ROOT

NOTEBOOK = ROOT / "docs" / "library.ipynb"


def test_the_notebook_is_kept_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_notebook_imports_only_existing_names():
    code = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    named = {(str(node.module), alias.name) for node in imports for alias in node.names}
    assert ("rheostat", "train") in named
    assert [name for name in named if not hasattr(importlib.import_module(name[0]), name[1])] == []


def test_the_configuration_of_the_notebook_is_valid():
    first = next(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    names = dict[str, object]()
    exec(first, names)  # the page's own code
    assert isinstance(names["config"], RunConfig)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_notebook_trains_reads_and_measures_a_policy_in_a_separate_process(tmp_path, prefect_api, monkeypatch):
    for variable, value in {
        "PREFECT_API_URL": prefect_api,
        **AUTH,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    _, trained, iterations, rollouts, measured = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "Accuracy(number=2" in str(trained)
    assert "(2, " in str(iterations)
    assert "reward_count" in str(rollouts)
    assert "problems=8" in str(measured)
