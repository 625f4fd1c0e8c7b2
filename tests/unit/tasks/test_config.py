"""Parsing of the configuration and the identity of a run. Refused settings are in the tables of tests/unit/refusals."""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter, ValidationError

from rheostat.infra.config import PoolsConfig, Settings, describe_difference
from rheostat.infra.errors import BadInput
from rheostat.tasks.config.run import LAYOUT, RunConfig, load_config, override_config, parse_config
from rheostat.tasks.run.rescorings import RecreditTerms
from tests.support.configurations import accepted, refusal
from tests.support.demos import ARITHMETIC, ArithmeticData, demo_part


def test_unset_keys_of_a_nested_table_have_the_defaults_of_the_kind_of_policy():
    decoder = accepted(
        "policy.kind=target",
        "policy.target=scratch_vision:VisionScratchPolicy",
        "policy.options.decoder.context=160",
    ).policy.decoder
    assert decoder == demo_part("vision/scratch_vision:VisionScratchPolicy")().decoder.model_copy(
        update={"context": 160}
    )
    assert parse_config({"data": ARITHMETIC}, source="nothing") == RunConfig(data=ArithmeticData())


def numbers_of(document: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Return the dotted keys of the numbers in a document."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}"


@pytest.mark.thorough
def test_building_a_form_of_a_configuration_does_not_change_its_schema():
    def flow(config: RunConfig) -> None: ...

    def checks(schema: object) -> int:
        parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
        return sum(map(checks, parts)) + (isinstance(schema, dict) and schema.get("type") == "function-before")

    found = set()
    for _ in range(3):
        parameter_schema(flow)
        found.add(checks(TypeAdapter(RunConfig).core_schema))
    assert len(found) == 1


def test_true_is_not_accepted_as_a_number():
    settings = ("warmup.steps=3", "rollout.dynamic.margin=2")
    document = accepted(*settings).model_dump(mode="json")
    keys = list(numbers_of(document))
    assert {"seed", "rollout.group_size", "update.learning_rate", "rollout.dynamic.margin", "pools.workers"} <= {*keys}
    for key in keys:
        if key.startswith("data."):
            continue  # options of a user's class
        with pytest.raises(BadInput, match=rf"run.toml: {key}[.\w]* .*(integer|number).* True"):
            override_config(document, [f"{key}=true"], source="run.toml")
    assert parse_config({"data": ARITHMETIC, "report": False}, source="run.toml").report is False


def test_no_key_of_any_kind_of_settings_accepts_true_unless_it_is_a_boolean():
    accepting = []
    for kind in subclasses(Settings):
        for name, field in kind.model_fields.items():
            if re.search(r"\b(bool|JsonValue|object)\b", str(field.annotation)) or inspect.isabstract(kind):
                continue
            with pytest.raises(ValidationError) as refused:
                kind.model_validate({name: True, "no such key": 0})
            if name not in {error["loc"][0] for error in refused.value.errors()}:
                accepting.append(f"{kind.__name__}.{name}")
    assert accepting == []


def subclasses(base: type) -> set[type]:
    return {found for child in base.__subclasses__() for found in (child, *subclasses(child))}


def test_several_faults_are_reported_at_once_with_unknown_keys_first():
    faults = ("seed=-1", "noname=1", "rollout.prompts=0", "warmup={steps=0,batch_size=0}", "retention.keep_last=1")
    message = refusal(*faults)
    assert 0 < message.index("'noname'") < message.index("seed") < message.index("warmup.steps")
    assert message.endswith("and 2 more") and "retention" not in message


def test_overrides_are_toml_or_bare_text_and_the_last_one_counts():
    config = override_config(
        {"data": ARITHMETIC, "seed": 1},
        ["seed=2", "seed=3", "store=elsewhere", 'rollout.sampling.stop=["\\n"]', "update.learning_rate=1e-4"],
        source="run.toml",
    )
    assert (config.seed, config.store, config.rollout.sampling.stop) == (3, "elsewhere", ("\n",))
    assert config.update.learning_rate == 1e-4


def test_an_empty_override_restores_the_default():
    document = {"data": ARITHMETIC, "seed": 7, "warmup": {"steps": 3}}
    kept = copy.deepcopy(document)
    config = override_config(document, ["seed=", "warmup="], source="run.toml")
    assert (config.seed, config.warmup) == (0, None)
    assert document == kept


def test_an_override_of_the_kind_drops_the_keys_of_the_previous_kind():
    document = {"data": ARITHMETIC, "policy": {"kind": "scratch", "layers": 3, "context": 64}}
    config = override_config(document, ["policy.path=model", "policy.kind=directory"], source="run.toml")
    assert config.policy.model_dump(exclude_unset=True) == {"kind": "directory", "path": Path("model")}
    same = override_config(document, ["policy.kind=scratch", "policy.heads=8"], source="run.toml")
    assert (same.policy.layers, same.policy.heads) == (3, 8)


def test_a_file_that_is_not_utf_8_is_refused_by_its_name(tmp_path):
    (tmp_path / "broken.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(BadInput, match=r"broken.toml .*'utf-8'"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    "override",
    [
        "name=other", "store=elsewhere", "iterations=99", "controllers.count=5", "controllers.where=deployment",
        "pools.workers=7", "pools.workers={min=1,max=9}", "pools.wait_seconds=9",
        "pools.scoring_workers=3", "pools.stall_seconds=9", "pools.gpus_per_update_rank=1",
        "pools.ray_address=auto", "pools.cluster=threads", "retention.keep_last=9", "retention.keep_every=2",
    ],
)  # fmt: skip
def test_settings_that_do_not_change_results_do_not_change_the_fingerprint(override):
    assert accepted(override).fingerprint() == RunConfig(data=ArithmeticData()).fingerprint()


def test_worker_slots_are_a_number_or_a_range_and_are_written_as_they_were_read():
    for written, fewest in ((4, 4), ({"min": 2, "max": 8}, 2)):
        pools = PoolsConfig.model_validate({"workers": written})
        assert pools.workers.min_slots == fewest
        assert pools.model_dump(mode="json")["workers"] == written


def test_a_run_continues_with_its_minimum_or_with_the_slots_that_its_roles_need():
    judge = 'scoring.rewards=[{kind="judge",slots=2,model={kind="directory",path="judge"}}]'
    expected = {"pools.workers={min=4,max=8}": 4, "pools.workers=4": 2, "placement.kind=fixed pools.workers=4": 3}
    for overrides, least in expected.items():
        assert accepted(judge, *overrides.split()).min_slots == least


@pytest.mark.parametrize(
    "override",
    [
        "seed=1", "data.options.operations=3",
        "data.options.on_too_long=drop", "policy.kind=scratch policy.layers=3", "warmup.steps=9",
        "rollout.prompts=65", "rollout.group_size=9", "rollout.shard_prompts=16", "rollout.sampling.top_p=0.9",
        "rollout.engine.kind=transformers rollout.engine.dtype=bfloat16", "scoring.timeout_seconds=9",
        'scoring.rewards=[{kind="math"}]',
        "algorithm.kind=rloo", "update.learning_rate=2e-6", "update.loss.kind=ppo_clip update.loss.clip_high=0.2",
        "update.kl.kind=k3", "update.correction.kind=none", "pools.update_ranks=2", "pools.threads=2",
        "evaluation.problems=9", "update.router_replay=rollout", "update.attention=eager", "update.attention=sdpa",
        "pools.update_ranks=2 update.sequence_parallel=2",
    ],
)  # fmt: skip
def test_settings_that_change_results_change_the_fingerprint(override):
    changed = accepted(*override.split())
    assert changed.fingerprint() != RunConfig(data=ArithmeticData()).fingerprint()


@pytest.mark.parametrize("override", ["algorithm.std=batch", "algorithm.advantage_clip=5"])
def test_keys_added_after_runs_were_stored_are_not_in_the_identity_at_their_default(override):
    key = override.partition(".")[2].partition("=")[0]
    plain, changed = (accepted("algorithm.kind=grpo", *more) for more in ([], [override]))
    assert plain.fingerprint() == RunConfig(data=ArithmeticData()).fingerprint() != changed.fingerprint()
    assert key not in plain.identity()["algorithm"]
    assert parse_config(changed.identity(), source="run.json").fingerprint() == changed.fingerprint()
    assert key not in RecreditTerms(algorithm=plain.algorithm).as_recorded()["algorithm"]


def test_the_number_of_iterations_is_in_the_fingerprint_if_the_schedule_depends_on_it():
    linear = ["update.schedule=linear"]
    short, long = (accepted(*linear, f"iterations={n}") for n in (8, 9))
    assert short.fingerprint() != long.fingerprint()


def test_a_run_may_continue_with_another_degree_of_sequence_parallelism():
    whole, sliced = (accepted("pools.update_ranks=2", f"update.sequence_parallel={slices}") for slices in (1, 2))
    assert not {"sequence_parallel", "router_replay"} & {*whole.identity()["update"]}
    assert whole.layout() == {"pools.update_ranks": 2, "pools.threads": 1, "update.zero_stage": 0}
    assert sliced.layout() == whole.layout() | {"update.sequence_parallel": 2}
    assert describe_difference(whole.identity(), sliced.identity()) == "update.sequence_parallel was absent, is 2"
    assert describe_difference(whole.identity(), sliced.identity(), ignored=LAYOUT) == ""
    for one, other in ((whole, sliced), (sliced, whole)):
        assert one.with_layout(other.layout()).fingerprint() == other.fingerprint()
    assert sliced.with_layout({}) == sliced


def test_a_run_can_be_read_back_from_its_identity():
    config = accepted("name=x", "seed=5", "update.kl.kind=k3", "warmup.steps=3")
    again = parse_config({**config.identity(), "name": "x"}, source="run.json")
    assert again.fingerprint() == config.fingerprint()


# ---- files that extend others


def write_config(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_extends_another_key_by_key_and_another_kind_or_list_replaces_the_old_one(tmp_path):
    data = 'data = {kind = "file", path = "a.jsonl"}'
    first = f'name = "first"\niterations = 7\n{data}\nupdate = {{minibatches = 8, learning_rate = 1e-4}}'
    write_config(tmp_path / "first.toml", first)
    base = 'extends = "first.toml"\npolicy = {kind = "scratch", layers = 3}\nupdate.minibatches = 2'
    write_config(tmp_path / "base.toml", base)
    own = 'extends = "../base.toml"\nname = "own"\ntags = ["a"]\n[policy]\nheads = 8\n[update]\nbeta1 = 0.5'
    config = load_config(write_config(tmp_path / "jobs/own.toml", own), ["iterations=9"])
    assert (config.name, config.iterations, config.tags) == ("own", 9, ("a",))
    assert (config.policy.layers, config.policy.heads) == (3, 8)
    assert (config.update.minibatches, config.update.learning_rate, config.update.beta1) == (2, 1e-4, 0.5)
    other = 'extends = "base.toml"\n[policy]\nkind = "directory"\npath = "model"'
    found = load_config(write_config(tmp_path / "other.toml", other))
    assert found.policy.model_dump(exclude_unset=True) == {"kind": "directory", "path": tmp_path / "model"}
    assert found.name == "first"


def test_every_variant_has_a_unique_title_with_its_kind_and_a_description():
    definitions = RunConfig.model_json_schema()["$defs"]
    titles = {name: each["title"] for name, each in definitions.items() if "kind" in each.get("properties", {})}
    assert titles["Grpo"] == "grpo: Reward minus the group mean, divided by the standard deviation"
    assert titles["KlPenalty"].startswith("k1, k2, k3: Penalty in the loss")
    for title in titles.values():
        assert re.fullmatch(r"[a-z0-9_]+(, [a-z0-9_]+)*: [A-Z1].*[^.]", title), title
    choices = [
        [titles[each["$ref"].rpartition("/")[2]] for each in field["oneOf"]]
        for definition in definitions.values()
        for field in definition.get("properties", {}).values()
        if "oneOf" in field and all("$ref" in each for each in field["oneOf"])
    ]
    assert len(choices) >= 5 and all(len({*choice}) == len(choice) for choice in choices)
