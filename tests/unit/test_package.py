"""The package `rheostat`: its names for scripts and notebooks, and what importing it loads."""

import subprocess
import sys

import pytest

import rheostat
from tests.support.jobs import ROOT

HEAVY = ("torch", "ray", "prefect", "transformers", "pydantic", "numpy", "pyarrow", "rheostat.infra", "rheostat.flows")


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, rheostat; sys.exit(str([name for name in {HEAVY} if name in sys.modules] or 0))"
    done = subprocess.run(
        [sys.executable, "-c", code.replace("or 0)", "or '')")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr.strip() == ""


def test_every_public_name_is_imported_from_the_module_that_defines_it():
    assert sorted(name for names in rheostat._NAMES.values() for name in names) == sorted(rheostat.__all__)
    for module, names in rheostat._NAMES.items():
        for name in names:
            assert getattr(rheostat, name) is getattr(sys.modules[f"rheostat.{module}"], name)
    assert {*rheostat.__all__} <= {*dir(rheostat)}


def test_the_page_on_python_lists_every_public_name():
    page = (ROOT / "docs/library.md").read_text()
    assert [name for name in rheostat.__all__ if f"`{name}" not in page] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rheostat' has no attribute 'nothing'"):
        rheostat.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from rheostat import nothing  # noqa: F401


def test_the_command_line_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "rheostat", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("rheostat "), done.stderr
