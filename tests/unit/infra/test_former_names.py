"""Former names of Rheostat's modules, which stored runs and users' code contain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.former_names import former_name, present_name
from rheostat.infra.plugins import TARGETS, find_target
from rheostat.models.config.algorithms import Grpo
from tests.support.jobs import ROOT, SEARCH_PATH

RULES = "models.rewards.rules:load_reward"


def test_a_former_import_string_names_the_present_module_unless_a_user_has_a_module_of_that_name(tmp_path):
    assert present_name(RULES, [str(tmp_path)]) == f"rheostat.{RULES}"
    (tmp_path / "models/rewards").mkdir(parents=True)
    assert present_name(RULES, [str(tmp_path)]) == f"rheostat.{RULES}"
    (tmp_path / "models/rewards/rules.py").touch()
    assert present_name(RULES, [str(tmp_path)]) == RULES


@pytest.mark.parametrize("name", ["tasks:Mine", "models.mine:Mine", "mine.models.rewards.rules:f", f"rheostat.{RULES}"])
def test_other_import_strings_stay_as_they_are(name, tmp_path):
    assert present_name(name, [str(tmp_path)]) == name


def test_the_checkout_itself_is_no_folder_of_the_user():
    assert present_name(RULES, [str(ROOT)]) == f"rheostat.{RULES}"


def test_the_stored_name_of_a_class_is_the_former_one():
    assert former_name(f"rheostat.{RULES}") == RULES
    assert former_name("mine:Mine") == "mine:Mine"


def test_a_former_target_is_found_in_a_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert find_target("models.config.algorithms:Grpo", where="algorithm") is Grpo


def test_a_module_that_is_neither_ours_nor_the_users_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"there is no module .*models\.nowhere"):
        find_target("models.nowhere:f", where="reward")


OLD_PLUGIN = """
import models.config.algorithms
from models.config.algorithms import Grpo
from infra.config import Settings

class Mine(Grpo):
    pass

assert models.config.algorithms.Grpo is Grpo
"""
USE = """
import sys, warnings
from rheostat.infra.plugins import find_target
from rheostat.models.config import algorithms
mine = find_target("plugin:Mine", where="algorithm")
assert issubclass(mine, algorithms.Grpo)
assert sys.modules["models.config.algorithms"] is algorithms
assert algorithms.__spec__.name == algorithms.__name__ == "rheostat.models.config.algorithms"
"""


def run_code(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program in a folder of the user, with Rheostat on its module path."""
    environment = {name: value for name, value in os.environ.items() if name != TARGETS} | {"PYTHONPATH": SEARCH_PATH}
    command = [sys.executable, "-P", "-W", "always::FutureWarning", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("has_checkpoints", [False, True], ids=["", "next to a folder of models"])
def test_a_users_module_may_import_rheostats_modules_by_their_former_names(tmp_path, has_checkpoints):
    (tmp_path / "plugin.py").write_text(OLD_PLUGIN)
    if has_checkpoints:
        (tmp_path / "models/tiny").mkdir(parents=True)
    done = run_code(USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Import 'rheostat.models' instead." in done.stderr and "Import 'rheostat.infra' instead." in done.stderr


@pytest.mark.parametrize("file", ["models.py", "models/__init__.py", "models/mine.py"])
def test_a_users_own_package_is_imported_instead_of_a_former_one(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    (tmp_path / "plugin.py").write_text("import models\nplace = [*getattr(models, '__path__', [models.__file__])][0]\n")
    code = "from rheostat.infra.plugins import find_target\nprint(find_target('plugin:place', where='reward'))"
    done = run_code(code, tmp_path)
    assert done.stdout.startswith(str(tmp_path / "models")), done.stderr
