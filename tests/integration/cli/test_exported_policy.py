"""`rheostat export-policy` during a run: exports are complete or absent, have a model card, and go to the Hub."""

import json
from contextlib import contextmanager

import huggingface_hub
import pytest
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput, EndpointDown
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.hub import fetch_snapshot
from rheostat.infra.store.hub_names import HubAddress
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run
from rheostat.models.commands.export import export
from rheostat.models.config.promotion import CardConfig
from rheostat.tasks.commit import retire_bundles
from rheostat.tasks.config.run import parse_config
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.views import policy_export
from rheostat.tasks.views.card import model_card
from rheostat.tasks.views.policy_export import PolicyExport, export_policy, push_policy
from tests.support.demos import ARITHMETIC
from tests.support.policies import write_policy


@pytest.fixture
def run(tmp_path):
    """Run without iterations, with its initial policy."""
    config = {
        "name": "going-on",
        "data": ARITHMETIC,
        "promotion": {"registry": "a", "card": {"license": "apache-2.0", "base_model": "a/b"}},
    }
    made = create_run(str(tmp_path / "store"), "going-on", parse_config(config, source="test").model_dump(mode="json"))
    with made.lock():
        commit_version(made, 0, tmp_path)
        yield made


def commit_version(run, number, tmp_path):
    """Commit a policy version, and the seal of its iteration."""
    directory = tmp_path / f"made-{number}"
    directory.mkdir()
    write_policy(directory, seed=number)
    bundle = publish_bundle(run.store, directory, prefix="policies")
    run.commit(Manifest(key=StageKey.policy(number), bundles={"weights": bundle}, detail={"version": number}))
    if number:
        run.commit(Manifest(key=StageKey.of(iteration_key(number), "seal")))


def retire(run, number):
    return retire_bundles(run, [run.require(StageKey.policy(number)).bundles["weights"]])


@contextmanager
def while_copied(monkeypatch, *, before=lambda: None, after=lambda: None):
    """Copy files in this process, and call a function before or after the first copy."""
    happenings = iter([(before, after)])

    def copy(work):
        first, then = next(happenings, (lambda: None, lambda: None))
        first()
        export(work)
        then()

    with monkeypatch.context() as patched:
        patched.setattr(policy_export, "write_in_process", copy)
        yield


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("iteration", [None, 1])
def test_retention_keeps_the_files_of_a_policy_during_its_export(run, tmp_path, monkeypatch, moment, iteration):
    commit_version(run, 1, tmp_path)

    def continue_run():
        commit_version(run, 2, tmp_path)
        assert len(retire(run, 1)) == 1

    with while_copied(monkeypatch, **{moment: continue_run}):
        done = export_policy(run, tmp_path / "out", iteration=iteration, dtype=None)
    assert (done.iteration, done.digest) == (1, run.require(StageKey.policy(1)).bundles["weights"].digest)
    assert retire(run, 1) == [] and run.store.entries(f"policies/{done.digest[:16]}/") == []
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "made-1")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made-0", "made-1", "made-2", "out", "store"]


@pytest.mark.parametrize("iteration", [None, 1])
def test_a_policy_that_retention_deletes_before_the_export_locks_its_files_is_not_exported(
    run, tmp_path, monkeypatch, iteration
):
    commit_version(run, 1, tmp_path)
    keep = policy_export.keep_while_read

    def overtaken(store, bundles):
        monkeypatch.setattr(policy_export, "keep_while_read", keep)
        commit_version(run, 2, tmp_path)
        retire(run, 1)
        return keep(store, bundles)

    monkeypatch.setattr(policy_export, "keep_while_read", overtaken)
    monkeypatch.setattr(policy_export, "write_in_process", export)
    if iteration is None:
        assert export_policy(run, tmp_path / "out", iteration=None, dtype=None).iteration == 2
    else:
        message = "the policy after iteration 1 were deleted by retention. Policies with files: 0, 2$"
        with pytest.raises(BadInput, match=message):
            export_policy(run, tmp_path / "out", iteration=1, dtype=None)
        assert not (tmp_path / "out").exists()


def test_a_policy_of_a_store_that_cannot_be_written_is_exported_with_a_warning(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(policy_export, "write_in_process", export)
    (tmp_path / "store/going-on/readers").write_text("in the way, as a read-only file system is")
    export_policy(run, tmp_path / "out", iteration=None, dtype=None)
    assert "The files policies/" in caplog.text and "retention may delete them" in caplog.text


def test_a_damaged_policy_is_reported_as_damaged(run, tmp_path):
    next((tmp_path / "store").glob("going-on/policies/*/tokenizer.json")).unlink()
    policy_export.fetch_bundle.__globals__["_known"].clear()
    with pytest.raises(policy_export.Damaged, match=r"expected .* bytes, found no file"):
        export_policy(run, tmp_path / "out", iteration=None, dtype=None)


@pytest.mark.system
def test_the_card_of_an_export_has_results_and_settings_of_the_run(reference, tmp_path):
    told = reference.command("export-policy", "--to", str(tmp_path / "out"), "--json")
    assert told.code == 0, told.output
    digest = json.loads(told.output)["digest"]
    card = (tmp_path / "out" / "README.md").read_text()
    matter = yaml.safe_load(card.split("---")[1])
    assert matter == {"tags": ["rheostat", "reinforcement-learning"], "pipeline_tag": "text-generation"}
    shown = json.loads(reference.command("show", "--json").output)
    measured = {each["number"]: each for each in shown["evaluations"]}
    for number in (0, 3):
        interval = "{mean:.3f} (95% interval {low:.3f} to {high:.3f}, 8 problems, greedy)".format(**measured[number])
        assert f"- held-out accuracy after iteration {number}: {interval}\n" in card
    assert f"- policy: `{digest}`\n" in card and f"- fingerprint: `{shown['fingerprint']}`\n" in card
    assert "- `learning_rate` = `0.001`\n" in card and "- `kind` = `arithmetic`\n" in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


def test_a_card_has_the_configured_license_and_base_model(run):
    card = policy_export.card_of(run, policy_export.policy_of(run.require(StageKey.policy(0))), number=0)
    matter = yaml.safe_load(card.split("---")[1])
    assert (matter["license"], matter["base_model"]) == ("apache-2.0", "a/b")


@pytest.fixture
def exported(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "out" / "README.md").write_text("---\ntags:\n- rheostat\n---\n# tiny\n")
    return PolicyExport(run="tiny", iteration=3, digest="d", merged=False, path=str(tmp_path / "out"))


def test_a_policy_is_pushed_to_a_private_repository_and_fetched_by_its_name(exported, hub):
    pushed = push_policy(exported, "team/model", token="hf_good")
    assert pushed.pushed == f"{hub.url}/team/model"
    repository = hub.repositories["models", "team/model"]
    assert repository.is_private and repository.messages == ["Policy 3 of run tiny"]
    assert set(repository.commits[-1]) == {"config.json", "README.md", "model.safetensors"}
    fetched = fetch_snapshot(HubAddress("model", "team/model"))
    assert (fetched / "model.safetensors").read_bytes() == b"weights"


def test_a_push_that_the_hub_refuses_names_the_command_that_pushes_the_directory(exported, hub):
    with pytest.raises(EndpointDown, match=r"could not be pushed to the Hub: .*401.*`hf upload team/model"):
        push_policy(exported, "team/model", token="hf_bad")


def test_a_card_contains_no_absolute_paths(tmp_path):
    config = {"data": {"path": "/home/ann/rows.jsonl"}, "scoring": {"paths": ["/home/ann/a", "data/b"]}}
    card = model_card(CardConfig(), title="tiny", lineage={}, config=config, evaluations=[])
    assert "/home" not in card and "`path` = `…/rows.jsonl`" in card and "['…/a', 'data/b']" in card


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("team/model", ["token", "HF_TOKEN", "`hf auth login`"]),
        ("a b", ["name on the Hugging Face Hub", "team/my-model"]),
    ],
)
def test_a_push_without_a_token_or_a_valid_name_is_refused_and_writes_nothing(
    reference, tmp_path, monkeypatch, name, names
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    ended = reference.command("export-policy", "--to", str(tmp_path / "out"), "--push", name)
    assert ended.code == 2 and all(part in ended.output for part in names)
    assert not (tmp_path / "out").exists()
