"""Retrains read files of problems by the rules by which the champion's run read them."""

import pytest

from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import create_run
from rheostat.models.config.file_rules import find_file_version
from rheostat.tasks.config.run import override_config
from rheostat.tasks.promotion.draft import describe_file_rules, draft_retrain
from tests.support.champions import append_record

RULES = {"registry": "assistant", "problems": "all", "primary": {"suite": "heldout", "min_gain": 0}}
FILE = {"kind": "file", "path": "a.jsonl", "prompt_column": "prompt"}


def draft_config(tmp_path, champion, data):
    """Return the configuration of a retrain whose champion was trained with the `champion` table as its data."""
    settings = {"name": "job-20261109", "store": str(tmp_path / "store"), "promotion": RULES, "data": data}
    config = override_config(settings, [], source="job")
    if champion is not None:
        create_run(config.store, "first", {"data": champion})
    append_record(open_registry(config.store, "assistant"), tmp_path, "a", run="first")
    draft = draft_retrain(config)
    return config, draft, draft.start_config(config)


@pytest.mark.parametrize(
    ("champion", "version"),
    [
        (FILE, 1),
        (FILE | {"version": 1}, 1),
        (FILE | {"version": 2}, 2),
        ({"kind": "mixture", "sources": [FILE | {"version": 2}, FILE]}, 1),
        ({"kind": "deduplicated", "source": FILE}, 1),
        ({"kind": "arithmetic"}, 2),
        (None, 2),
    ],
    ids=["before the key", "version 1", "version 2", "mixture", "deduplicated", "generated", "deleted run"],
)
def test_a_retrain_reads_files_by_the_rules_of_the_run_of_the_champion(tmp_path, champion, version):
    _, _, started = draft_config(tmp_path, champion, {"kind": "file", "path": "a.jsonl"})
    assert started.data.version == version


def test_every_file_of_a_mixture_is_read_by_the_rules_of_the_champion(tmp_path):
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    _, _, started = draft_config(tmp_path, FILE, {"kind": "mixture", "sources": sources})
    assert [source.version for source in started.data.sources] == [1, 1]


def test_a_version_in_the_configuration_wins_over_the_version_of_the_champion(tmp_path):
    config, draft, started = draft_config(tmp_path, FILE, {"kind": "file", "path": "a.jsonl", "version": 2})
    assert (started.data.version, draft.data_version) == (2, 2)
    assert "Problems on which the champion was trained may be held out" in (describe_file_rules(config) or "")


def test_only_the_files_of_a_mixture_without_a_version_are_read_by_the_rules_of_the_champion(tmp_path):
    sources = [{"path": "a.jsonl", "version": 2}, {"path": "b.jsonl"}]
    config, draft, started = draft_config(tmp_path, FILE, {"kind": "mixture", "sources": sources})
    assert [source.version for source in started.data.sources] == [2, 1]
    assert draft.data_version == 1
    assert "reads files without a set version by version 1" in (describe_file_rules(config) or "")


def test_a_draft_of_an_earlier_version_still_replaces_the_configured_version(tmp_path):
    config, draft, _ = draft_config(tmp_path, FILE, {"kind": "file", "path": "a.jsonl", "version": 2})
    earlier = draft.model_copy(update={"data_version": 1, "keeps_set_versions": False})
    assert earlier.start_config(config).data.version == 1


@pytest.mark.parametrize("champion", [FILE | {"version": 2}, {"kind": "arithmetic"}, None])
def test_the_plan_has_no_note_about_rules_if_the_champion_was_not_trained_by_version_1(tmp_path, champion):
    config, _, _ = draft_config(tmp_path, champion, {"kind": "file", "path": "a.jsonl", "version": 2})
    assert describe_file_rules(config) is None


def test_the_draft_keeps_the_rules_if_the_run_of_the_champion_is_deleted_later(tmp_path):
    config, draft, _ = draft_config(tmp_path, FILE, {"kind": "file", "path": "a.jsonl"})
    registry = open_registry(config.store, "assistant")
    append_record(registry, tmp_path, "b", run=config.name)
    following = draft_retrain(config.model_copy(update={"name": "job-20261110"}))
    assert (draft.data_version, following.data_version) == (1, 1)


def test_generated_data_has_no_rules_for_files():
    assert find_file_version({"kind": "arithmetic", "train_problems": 3}) is None
