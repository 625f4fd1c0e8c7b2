"""The lineage of a champion, compared with digests that the test follows, and the policies that a prompt trained."""

import json
import shutil
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import UUID

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.garbage import delete_run
from rheostat.infra.store.registry import POLICIES, RegistryRecord, open_registry
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.promotion.draft import Draft, draft_key, trained_ids_key
from tests.support.jobs import manifests_of
from tests.support.prompts import choose_prompts


@pytest.fixture
def store(reference, tmp_path):
    """Copy of the undisturbed run, whose policy is the champion. The run of the previous champion no longer exists."""
    shutil.copytree(reference.run, tmp_path / "runs/tiny")
    registry = open_registry(str(tmp_path / "runs"), "assistant")
    run = open_run(str(tmp_path / "runs"), "tiny")
    for name, policy, champion in (("first", "0" * 64, 0), ("tiny", run.require("it-0003/seal").detail["policy"], 1)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model").write_text(name)
        draft = Draft(run=name, champion=champion, policy="", without="")
        registry.store.put(draft_key(name), seal(draft.model_dump(mode="json")))
        registry.store.put(trained_ids_key(name), b"".join(f"{each}\n".encode() for each in prompts(run)))
        made = RegistryRecord(
            number=champion + 1,
            kind="promote",
            policy=policy,
            bundle=publish_bundle(registry.store, directory, prefix=POLICIES),
            run=name,
            iteration=3,
            previous=champion,
            gate={"verdict": "promote", "reasons": ["sums: better"], "evidence": None},
            reason="sums: better",
            who="retrain",
            when="2026-11-23T00:00:00+00:00",
            version="1",
        )
        registry.append(lambda number, champion, made=made: made)
    return tmp_path / "runs"


@pytest.fixture
def run_lineage(store, capsys):
    """Function that runs the command and returns its exit code and its output."""

    def give(*words):
        capsys.readouterr()
        code = main(["lineage", *words, "--store", str(store)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return give


def prompts(run):
    return read_shard(run.store, run.require("prompts/train").shards[0])["prompt_id"].to_pylist()


def ancestors_of(store, ends):
    """Return the keys of manifests and of all their ancestors, read from their files."""
    files = [json.loads(path.read_text()) for path in (store / "tiny/manifests").rglob("*.json")]
    by_digest, found, ahead = {each["digest"]: each for each in files}, set(), [*ends]
    by_key = {each["key"]: each for each in files}
    while ahead:
        key = ahead.pop()
        found.add(key)
        ahead += [by_digest[parent]["key"] for parent in by_key[key]["parents"]]
    return found


def test_a_champion_is_traced_to_all_parents_of_its_seals_and_to_the_previous_champion(store, run_lineage):
    code, said = run_lineage("assistant@champion", "--json")
    assert code == 0
    champion, before = json.loads(said)
    run, record = champion["run"], json.loads((store / "tiny/run.json").read_text())
    ends = [f"it-{number:04d}/seal" for number in (1, 2, 3)]
    evaluated = [key for key in manifests_of(store / "tiny") if key.endswith("/summary")]
    assert {each["key"] for each in run["manifests"]} == ancestors_of(store, [*ends, *evaluated])
    assert {each["key"]: each["digest"] for each in run["manifests"]}.items() <= manifests_of(store / "tiny").items()
    assert {"prompts/train", "policy/base", "policy/sft", "it-0001/rollout/0002"} <= {
        each["key"] for each in run["manifests"]
    }
    assert (run["fingerprint"], run["policy"]) == (record["fingerprint"], champion["record"]["policy"])
    assert run["dependencies"][0]["dependencies"]["libraries"]["rheostat"]
    assert run["rewards"][0]["version"].startswith("code ")
    shards = [part["state"] for each in run["manifests"] for part in each["parts"] if part["name"] == "shard"]
    assert len(shards) > 20 and {*shards} == {"there"}
    assert (champion["began_as"], before["name"], before["run"], before["began_as"]) == (1, "first", None, 0)


def test_a_version_is_found_by_registry_number_run_and_policy(store, run_lineage):
    expected = run_lineage("assistant@champion")
    policy = json.loads(run_lineage("assistant@2", "--json")[1])[0]["record"]["policy"]
    for name in ("assistant@2", "assistant", "tiny", policy, policy[:8]):
        assert run_lineage(name) == expected
    assert "assistant@2: policy" in expected[1] and "run first: no longer in this store" in expected[1]
    assert "3 seal, 3 update, 3 credit, 9 scoring, 9 rollout, 3 plan" in expected[1]
    code, everything = run_lineage("assistant", "--all")
    assert code == 0 and "it-0002/rollout/0001 " in everything and "from it-0001/update, prompts/train" in everything


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["asistant"], "did you mean 'assistant'?"),
        (["assistant@7"], "The registry has records 1 to 2"),
        (["assistant@best"], "or the number of a record"),
        (["other@1"], "there is no registry 'other' in"),
        (["ffffffff"], "must be the beginning of the digest of exactly one policy"),
        ([], "a policy, such as assistant@champion, or --prompt ID"),
        (["--prompt", "short"], "must be a prompt_id, which has 16 digits"),
    ],
)
def test_an_unknown_policy_is_refused_in_one_line(run_lineage, words, message):
    code, said = run_lineage(*words)
    assert code == 2 and message in said and len(said.splitlines()) == 1


def test_after_gc_deletes_shards_lineage_reports_the_deletion_and_has_every_digest(store, run_lineage):
    before = json.loads(run_lineage("assistant", "--json")[1])[0]["run"]
    with open_run(str(store), "tiny").lock() as run:
        delete_run(run, why="rheostat gc --keep 0")
    code, said = run_lineage("assistant")
    assert code == 0 and "deleted rollouts, samples and policies by rheostat gc --keep 0" in said
    after = json.loads(run_lineage("assistant", "--json")[1])[0]["run"]
    assert {part["state"] for each in after["manifests"] for part in each["parts"]} == {"deleted"}
    digests = [[(each["key"], each["digest"]) for each in run["manifests"]] for run in (before, after)]
    assert digests[0] == digests[1]


def test_a_prompt_is_found_in_the_promoted_policies_and_iterations_that_were_trained_on_it(
    reference, store, run_lineage
):
    run, (asked, _, heldout) = open_run(str(store), "tiny"), choose_prompts(reference)
    row = prompts(run).index(asked)
    iterations = [number for number in (1, 2, 3) if row in run.require(f"it-{number:04d}/plan").detail["rows"]]
    tables = [read_shard(run.store, run.require(f"it-{number:04d}/credit").shards[0]) for number in iterations]
    samples = sum(table["prompt_row"].to_pylist().count(row) for table in tables)
    code, said = run_lineage("--prompt", asked, "--json")
    first, second = json.loads(said)
    assert (code, first["number"], first["learnt"][0]["gone"]) == (0, 1, True)
    assert [each["run"] for each in second["learnt"]] == ["tiny", "first"], "it came from that one"
    assert (second["learnt"][0]["iterations"], second["learnt"][0]["samples"]) == (iterations, samples)
    assert "champion, was trained on the prompts in run tiny: warm-up " in run_lineage("--prompt", asked)[1]
    code, said = run_lineage("--prompt", heldout)
    assert code == 0 and f"No promoted policy in {store} was trained on prompt {heldout}" in said


def test_openlineage_events_trace_the_champion_to_its_prompts_in_a_file_and_at_an_address(store, run_lineage, tmp_path):
    code, said = run_lineage("assistant", "--openlineage", str(tmp_path / "events.ndjson"))
    events = [json.loads(line) for line in (tmp_path / "events.ndjson").read_text().splitlines()]
    assert code == 0 and f"{len(events)} OpenLineage events" in said
    states, made_from = defaultdict(list), {}
    for event in events:
        assert event["schemaURL"].startswith("https://openlineage.io/spec/2-") and event["producer"]
        states[UUID(event["run"]["runId"])].append(event["eventType"])
        for output in event["outputs"]:
            made_from[output["name"]] = {each["name"] for each in event["inputs"]}
    assert {*map(tuple, states.values())} == {("START", "COMPLETE")}
    found, ahead = set(), [name for name in made_from if name.startswith("registry/assistant/policies/")][1:]
    while ahead:
        found.add(name := ahead.pop())
        ahead += made_from.get(name, ())
    assert {f"tiny/{key}" for key in ancestors_of(store, ["it-0003/update"])} < found
    assert len([name for name in found if name.startswith("registry/")]) == 2, "the champion before, too"
    with listening() as (address, received):
        assert run_lineage("assistant", "--openlineage", address)[0] == 0
    assert received == events
    code, said = run_lineage("assistant", "--openlineage", str(tmp_path / "events.ndjson"))
    assert code == 2 and "Name a new file" in said


class listening:  # noqa: N801
    """Run a service that receives lineage events."""

    def __enter__(self):
        received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/api/v1/lineage"
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(201)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}", received

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
