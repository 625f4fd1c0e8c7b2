"""Tables of the command line: whole columns that fit the terminal, and a line about the others."""

import sys

from rheostat.infra.terminal import table

ROWS = [
    {"run": "first", "accuracy": "0.875", "reason": "a long text that is wide", "took": "0:01:02", "created": "Monday"},
    {"run": "second", "accuracy": "0.5", "reason": "-", "took": "0:00:59", "created": "Tuesday"},
]


def test_a_table_with_room_has_all_columns():
    lines = table(ROWS, width=61).splitlines()
    assert lines[1] == "first      0.875  a long text that is wide  0:01:02   Monday"
    assert len(lines) == 3


def test_columns_without_room_are_omitted_from_the_right_and_named():
    lines = table(ROWS, width=58).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["took", "0:01:02", "0:00:59"]
    assert " ".join(lines[3:]).startswith("columns that do not fit: created (")
    assert all(len(line) <= 58 for line in lines[:3])


def test_the_least_important_columns_are_omitted_first():
    lines = table(ROWS, width=40, drop_first=("took", "reason")).splitlines()
    assert lines[0] == "run     accuracy     took  created", "a wide column keeps no narrower one out"
    assert lines[1] == "first      0.875  0:01:02   Monday"
    assert "columns that do not fit: reason (" in lines[3]
    assert table(ROWS, width=25, drop_first=("took", "reason")).splitlines()[0] == "run     accuracy  created"


def test_a_file_or_pipe_gets_all_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert not sys.stdout.isatty()
    assert len(table(ROWS).splitlines()) == 3


def test_the_first_column_stays_even_without_room():
    assert table(ROWS, width=3).splitlines()[:3] == ["run", "first", "second"]
