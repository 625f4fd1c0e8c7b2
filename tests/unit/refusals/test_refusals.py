"""Every input of the tables in this folder is refused in one line that names what a user needs to fix it.

Commands that start a process with torch have `pytest.mark.system` in the tables, and some of them `pytest.mark.smoke`.
Further cases that take a CPU second or more have `pytest.mark.thorough`.
"""

import pytest

from tests.support.refusals import read_cases, refusal, write_folder


@pytest.mark.parametrize(("case", "folder"), read_cases())
def test_every_input_of_the_tables_is_refused_with_a_message_that_names_the_fault(
    case, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_folder(case, folder, tmp_path)
    message = refusal(case, tmp_path, capsys)
    assert "\n" not in message
    assert [part for part in case.names if part not in message] == [], message
