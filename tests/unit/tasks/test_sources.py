"""Sources of a target, found without importing it: its modules, their imports, and the names of libraries."""

import sys
from importlib.metadata import version

import pytest

from rheostat.infra.former_names import allow_former_imports
from rheostat.infra.plugins import register_demo
from rheostat.tasks.run.target_sources import library_version, rheostat_version, sources_of


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function that writes a module to a folder on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sys.path_importer_cache.clear()  # files that are made within one tick of the clock
        return path

    return written


def modules(target):
    return {*sources_of(target, sys.path).modules}


def test_sources_of_a_target_are_its_module_its_packages_and_all_their_imports(write):
    write("app_a/__init__.py", "from . import early")
    write("app_a/early.py")
    write("app_a/inner/__init__.py")
    write("app_a/inner/rules.py", "from ..shared import f\ndef g():\n    import app_b.late\n")
    write("app_a/shared.py", "import json, app_c")
    write("app_a/unused.py")
    write("app_b/late.py", "from app_a.inner import rules")  # in a package without a file, and in a circle
    write("app_c.py")
    own = {"app_a", "app_a.early", "app_a.inner", "app_a.inner.rules", "app_a.shared"}
    assert modules("app_a.inner.rules:g") == own | {"app_b.late", "app_c"}
    assert modules("app_c:g") == {"app_c"}


def test_editing_a_module_changes_its_digest_and_no_other_digest(write):
    write("app_d.py", "import app_e")
    write("app_e.py", "x = 1")
    before = sources_of("app_d:f", sys.path).modules
    write("app_e.py", "x = 2")
    after = sources_of("app_d:f", sys.path).modules
    assert before["app_d"] == after["app_d"]
    assert before["app_e"] != after["app_e"]


def test_sources_are_parsed_without_being_imported_and_invalid_modules_have_no_imports(write):
    write("app_f.py", "import app_g\nraise SystemExit")
    write("app_g.py", "def (:")
    assert modules("app_f:f") == {"app_f", "app_g"}
    assert not {"app_f", "app_g"} & {*sys.modules}
    assert modules("app_nowhere:f") == set()


def test_libraries_are_named_and_not_read_and_rheostats_modules_are_neither(write):
    write(
        "app_h.py", "import os, numpy.linalg\nfrom yaml import safe_load\nfrom rheostat.models.rewards import values\n"
    )
    found = sources_of("app_h:f", sys.path)
    assert {*found.modules} == {"app_h"}
    assert found.libraries == {"numpy", "yaml"}
    assert (
        modules("rheostat.models.rewards.rules:load_reward")
        == modules(register_demo("capo/arithmetic_steps:wrong_steps"))
        == set()
    )


def test_a_users_module_with_a_former_name_of_rheostats_is_read_from_the_given_folders(write, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    allow_former_imports()
    folder = write("elsewhere/models.py").parent
    assert {*sources_of("models:f", [str(folder)]).modules} == {"models"}


def test_an_installed_target_is_read_together_with_its_package(write):
    write("site-packages/app_i/__init__.py", "import app_j")
    write("site-packages/app_i/rules.py", "import app_i.more")
    write("site-packages/app_i/more.py")
    write("site-packages/app_j.py")
    sys.path.append(str(write("x").parent / "site-packages"))
    try:
        found = sources_of("app_i.rules:f", sys.path)
    finally:
        sys.path.pop()
    assert {*found.modules} == {"app_i", "app_i.rules", "app_i.more"}
    assert found.libraries == {"app_j"}


def test_a_library_has_the_version_of_its_distribution_even_if_the_names_differ():
    assert library_version("yaml") == version("PyYAML")
    assert library_version("numpy") == version("numpy")
    assert library_version("no_such_library") == "none"
    assert rheostat_version().startswith(f"{version('rheostat')}+")
