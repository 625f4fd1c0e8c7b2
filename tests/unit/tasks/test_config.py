"""The configuration: every fault in one line with the nearest name, and an identity of what matters alone."""

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter

from infra.config import PoolsConfig, difference
from infra.errors import BadInput
from models.config.policy import SeeingScratchPolicy
from tasks.config.run import LAYOUT, RunConfig, load_config, override_config, parse_config
from tasks.run.rescorings import RecreditTerms

RETRIEVER = Path(__file__).parents[3] / "configs/retriever.toml"
"""Of no run."""
CONFIGS = sorted({*RETRIEVER.parent.glob("*.toml")} - {RETRIEVER})


def complaint(text: str, *overrides: str) -> str:
    """The one line that a document earns."""
    with pytest.raises(BadInput) as refused:
        override_config(tomllib.loads(text), overrides, source="run.toml")
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix("run.toml: ")


def test_what_values_turns_needs_an_environment():
    rewards = "rewards = [{ kind = 'numeric', weight = 2 }, { kind = 'target', target = 'a:b', per = 'turn' }]"
    said = "reward 'target': per = 'turn' values turns of episodes, set [rollout.environment]"
    assert said in complaint(f"[scoring]\n{rewards}\n[algorithm]\nkind = 'capo'")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_parses_and_its_run_has_the_files_name(path):
    assert load_config(path).name == path.stem


@pytest.mark.parametrize(
    "override",
    ["pools.update_ranks=2", "pools.ray_address=auto", "pools.gpus_per_worker=1", "controllers.where=deployment"],
)
def test_what_threads_cannot_do_is_refused_in_a_line_that_names_it(override):
    key = override.partition("=")[0].rpartition(".")[2]
    told = complaint("", "pools.cluster=threads", override)
    assert key in told
    assert "'threads'" in told
    assert "'ray'" in told


def test_what_is_not_said_of_a_decoder_that_sees_is_as_if_nothing_was_said():
    said = {"policy": {"kind": "seeing_scratch", "decoder": {"context": 160}}}
    decoder = parse_config(said, source="here").policy.decoder
    assert decoder == SeeingScratchPolicy().decoder.model_copy(update={"context": 160})
    assert "did you mean 'context'?" in complaint("[policy]\nkind = 'seeing_scratch'\n[policy.decoder]\ncontxt = 1")


def test_the_defaults_are_a_configuration():
    assert parse_config({}, source="nothing") == RunConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iteration = 3", "unknown key 'iteration'; did you mean 'iterations'?"),
        ("[rollout]\npromts = 3", "unknown key 'rollout.promts'; did you mean 'prompts'?"),
        ("[rollout.enigne]\ndtype = 'float32'", "unknown key 'rollout.enigne'; did you mean 'engine'?"),
        (
            "[rollout.engine]\nkind = 'transformers'\ndtpe = 'float32'",
            "unknown key 'rollout.engine.dtpe'; did you mean 'dtype'?",
        ),
        (
            "[update.loss]\nkind = 'ppo_clip'\nclip_hi = 0.3",
            "unknown key 'update.loss.clip_hi'; did you mean 'clip_high'?",
        ),
        ("[update.kl]\nkind = 'k3'\ncoeficient = 1", "unknown key 'update.kl.coeficient'; did you mean 'coefficient'?"),
        (
            "[update.loss]\nkind = 'gspo'\n[update.loss.aggregation]\nkind = 'constant'\nlenght = 9",
            "unknown key 'update.loss.aggregation.lenght'; did you mean 'length'?; "
            "update.loss.aggregation.length: missing",
        ),
        (
            "[[scoring.rewards]]\nkind = 'regex'\npatern = 'x'",
            "unknown key 'scoring.rewards.0.patern'; did you mean 'pattern'?; scoring.rewards.0.pattern: missing",
        ),
        ("[warmup]\nstep = 3", "unknown key 'warmup.step'; did you mean 'steps'?"),
        (
            "learning_rate = 1",
            "unknown key 'learning_rate'; did you mean 'warmup.learning_rate' or 'dpo.learning_rate' or "
            "'algorithm.critic.learning_rate' or 'update.learning_rate'?",
        ),
        (
            "[rollout]\ntemperature = 1",
            "unknown key 'rollout.temperature'; "
            "did you mean 'rollout.sampling.temperature' or 'rollout.environment.sampling.temperature' or "
            "'evaluation.temperature'?",
        ),
        (
            "[rollout]\nxyzzy = 1",
            "unknown key 'rollout.xyzzy', expected one of prompts, group_size, shard_prompts, sampling, "
            "denoising, engine, staleness, dynamic, partial, environment",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_name(text, expected):
    assert complaint(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[data]\nkind = 'file'\npath = 'x.jsonl'\noperations = 3",
            "unknown key 'data.operations': it belongs to kind 'arithmetic'",
        ),
        (
            "[policy]\nkind = 'directory'\npath = 'x'\nlayers = 2",
            "unknown key 'policy.layers': it belongs to kind 'scratch' or 'scratch_diffusion'",
        ),
        (
            "[update.kl]\nkind = 'none'\ncoefficient = 1",
            "unknown key 'update.kl.coefficient': it belongs to kind 'k1' or 'k2' or 'k3'",
        ),
        (
            "[data]\nkind = 'files'",
            "data.kind: expected 'arithmetic' or 'pictures' or 'paintings' or 'calculations' or 'measures' or "
            "'file' or 'mixture' or 'deduplicated' or 'target', got 'files'; did you mean 'file'?",
        ),
        (
            "[policy]\nlayers = 2",
            "policy.kind: missing, expected 'scratch' or 'seeing_scratch' or 'directory' or 'merge' or 'diffusion' "
            "or 'scratch_diffusion'",
        ),
        (
            "[[scoring.rewards]]\nkind = 'maths'",
            "scoring.rewards.0.kind: expected 'numeric' or 'math' or 'regex' or 'similarity' or 'painting' or "
            "'clip' or 'target' or 'code' or 'environment' or 'judge' or 'model', got 'maths'; did you mean 'math'?",
        ),
        ("[data]\nkind = 'file'", "data.path: missing"),
    ],
)
def test_a_union_says_which_kinds_there_are_and_whose_key_it_is(text, expected):
    assert complaint(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rollout]\ngroup_size = 0", "rollout.group_size: expected greater than or equal to 1, got 0"),
        ("[rollout]\nshard_prompts = 0", "rollout.shard_prompts: expected greater than or equal to 1, got 0"),
        ("[update.loss]\nkind = 'ppo_clip'\nclip_low = 1.0", "update.loss.clip_low: expected less than 1, got 1.0"),
        ("[update]\nlearning_rate = nan", "update.learning_rate: expected a finite number, got nan"),
        ("[retention]\nkeep_last = 1", "retention.keep_last: expected greater than or equal to 2, got 1"),
        ("[pools]\nupdate_ranks = 0", "pools.update_ranks: expected greater than or equal to 1, got 0"),
        (
            "update.sequence_parallel = 2\npools.update_ranks = 3",
            "update.sequence_parallel 2: expected a divisor of pools.update_ranks 3",
        ),
        ("seed = -1", "seed: expected greater than or equal to 0, got -1"),
        ("iterations = 'ten'", "iterations: expected an integer, got 'ten'"),
        ("rollout = 3", "rollout: expected a table, got 3"),
        ("data = 'arithmetic'", "data: expected a table, got 'arithmetic'"),
        ("[scoring]\nrewards = 'math'", "scoring.rewards: expected a list, got 'math'"),
        ("[scoring]\nrewards = []", "scoring.rewards: should have at least 1 item, got []"),
        (
            "[policy]\nkind = 'scratch'\narchitecture = 'qwen'",
            "policy.architecture: expected 'llama' or 'qwen3', got 'qwen'; did you mean 'qwen3'?",
        ),
        ("[policy]\nkind = 'scratch'\nheads = 3", "policy: hidden_size 32 is not a multiple of heads 3"),
        (
            "[controllers]\nwhere = 'deployed'",
            "controllers.where: expected 'nested' or 'deployment', got 'deployed'; did you mean 'deployment'?",
        ),
        ("name = '../evil'", "name: should match pattern '^[a-z0-9][a-z0-9._-]{0,63}$', got '../evil'"),
        ("name = 'a..b'", "name: expected a name without '..', got 'a..b'"),
        ("[evaluation]\nproblems = 257", "evaluation.problems 257 exceeds data.heldout_problems 256"),
        (
            "[rollout.sampling]\ntemperature = 0",
            "rollout.sampling.temperature 0 makes every completion of a group the same: use above 0",
        ),
        (
            "scoring.rewards = [{kind = 'math'}, {kind = 'math'}]",
            "scoring: reward terms need different names, found math, math: set `name`",
        ),
    ],
)
def test_a_bad_value_is_answered_with_what_was_expected_and_what_came(text, expected):
    assert complaint(text) == expected


def numbers_of(document: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Dotted keys of the numbers in a document."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}"


def test_the_schema_of_a_configuration_is_the_same_however_often_forms_are_made_of_it():
    def flow(config: RunConfig) -> None: ...

    def checks(schema: object) -> int:
        parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
        return sum(map(checks, parts)) + (isinstance(schema, dict) and schema.get("type") == "function-before")

    found = set()
    for _ in range(3):
        parameter_schema(flow)
        found.add(checks(TypeAdapter(RunConfig).core_schema))
    assert len(found) == 1


def test_true_is_a_number_nowhere():
    warmup = override_config({}, ["warmup.steps=3", "rollout.dynamic.margin=2"], source="run.toml")
    document = warmup.model_dump(mode="json")
    keys = list(numbers_of(document))
    assert {"seed", "rollout.group_size", "update.learning_rate", "rollout.dynamic.margin", "pools.workers"} <= {*keys}
    for key in keys:
        with pytest.raises(BadInput, match=rf"run.toml: {key}[.\w]*: expected an? (integer|number), got True$"):
            override_config(document, [f"{key}=true"], source="run.toml")
    assert parse_config({"report": False}, source="run.toml").report is False
    with pytest.raises(BadInput, match=r"placement.replicas.honest: expected an integer, got True$"):
        override_config({}, ["placement.kind=adaptive", "placement.replicas={honest=true}"], source="run.toml")


def test_several_faults_are_told_at_once_unknown_keys_first():
    text = (
        "seed = -1\nnoname = 1\n[rollout]\nprompts = 0\n[warmup]\nsteps = 0\nbatch_size = 0\n[retention]\nkeep_last = 1"
    )
    told = complaint(text)
    assert told.startswith("unknown key 'noname'; did you mean 'name'?; seed: ")
    assert told.endswith("; and 2 more")
    assert len(told.split("; ")) == 6  # four faults, one of them with its hint, and the count


@pytest.mark.parametrize("override", ["rollout", "=3", "a..b=3", ".=3", "="])
def test_an_override_that_is_none_is_shown_how_one_looks(override):
    assert f"override {override!r}: expected dotted.key=value, such as" in complaint("", override)


def test_an_override_below_a_value_is_refused():
    assert complaint("seed = 3", "seed.x=3") == "override 'seed.x=3': 'seed' is not a table"


def test_a_broken_toml_value_is_told_as_such():
    assert "override 'scoring.rewards=[{': its value is not TOML: " in complaint("", "scoring.rewards=[{")


def test_overrides_are_toml_or_bare_text_and_the_last_one_counts():
    config = override_config(
        {"seed": 1},
        ["seed=2", "seed=3", "store=elsewhere", 'rollout.sampling.stop=["\\n"]', "update.learning_rate=1e-4"],
        source="run.toml",
    )
    assert (config.seed, config.store, config.rollout.sampling.stop) == (3, "elsewhere", ("\n",))
    assert config.update.learning_rate == 1e-4


def test_an_empty_override_goes_back_to_the_default():
    document = {"seed": 7, "warmup": {"steps": 3}}
    kept = copy.deepcopy(document)
    config = override_config(document, ["seed=", "warmup="], source="run.toml")
    assert (config.seed, config.warmup) == (0, None)
    assert document == kept


def test_another_kind_begins_its_table_anew_wherever_it_stands():
    document = {"policy": {"kind": "scratch", "layers": 3}}
    config = override_config(document, ["policy.path=model", "policy.kind=directory"], source="run.toml")
    assert config.policy.model_dump() == {"kind": "directory", "path": Path("model")}
    same = override_config(document, ["policy.kind=scratch", "policy.heads=8"], source="run.toml")
    assert (same.policy.layers, same.policy.heads) == (3, 8)


def test_a_file_that_is_no_toml_is_told_with_its_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("name = 'x'\n[rollout\nprompts = 3\n")
    with pytest.raises(BadInput, match=r"broken.toml is not TOML: .*line 2"):
        load_config(path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(BadInput, match=r"broken.toml is not TOML: 'utf-8' codec"):
        load_config(path)


def test_a_missing_file_is_answered_with_the_one_that_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/demo.toml").touch()
    for asked in ("configs/demo.tml", "configs/dmeo.toml", "demo.toml", "demo"):
        with pytest.raises(BadInput, match=r"looked in .*; did you mean configs/demo.toml\?"):
            load_config(Path(asked))
    with pytest.raises(BadInput, match=r"the configuration comes first: rheostat train CONFIG key=value"):
        load_config(Path("seed=3"))
    with pytest.raises(BadInput, match=r"configuration file configs: Is a directory"):
        load_config(Path("configs"))


@pytest.mark.parametrize(
    "override",
    [
        "name=other", "store=elsewhere", "iterations=99", "controllers.count=5", "controllers.where=deployment",
        "pools.workers=7", "pools.workers={min=1,max=9}", "pools.wait_seconds=9",
        "pools.scoring_workers=3", "pools.stall_seconds=9", "pools.gpus_per_update_rank=1",
        "pools.ray_address=auto", "pools.cluster=threads", "retention.keep_last=9", "retention.keep_every=2",
    ],
)  # fmt: skip
def test_what_results_do_not_depend_on_is_no_part_of_a_runs_identity(override):
    assert override_config({}, [override], source="run.toml").fingerprint() == RunConfig().fingerprint()


def test_worker_slots_are_a_number_or_a_range_and_are_written_as_they_were_read():
    for written, fewest in ((4, 4), ({"min": 2, "max": 8}, 2)):
        pools = PoolsConfig.model_validate({"workers": written})
        assert pools.workers.fewest == fewest
        assert pools.model_dump(mode="json")["workers"] == written
    with pytest.raises(BadInput, match=r"pools.workers: min 3 exceeds max 2$"):
        override_config({}, ["pools.workers={min=3,max=2}"], source="run.toml")
    with pytest.raises(BadInput, match=r"unknown key 'pools.workers.mim'; did you mean 'min'\?"):
        override_config({}, ["pools.workers={mim=3,max=4}"], source="run.toml")


def test_a_run_goes_on_with_its_min_or_with_as_many_slots_as_its_roles_need():
    judge = 'scoring.rewards=[{kind="judge",slots=2,model={kind="directory",path="judge"}}]'
    expected = {"pools.workers={min=4,max=8}": 4, "pools.workers=4": 2, "placement.kind=fixed pools.workers=4": 3}
    for overrides, least in expected.items():
        assert override_config({}, [judge, *overrides.split()], source="run.toml").least_slots == least
    with pytest.raises(BadInput, match=r"pools.workers.min 1: the reward models take at least 2 slots"):
        override_config({}, [judge, "pools.workers={min=1,max=8}"], source="run.toml")


@pytest.mark.parametrize(
    "override",
    [
        "seed=1", "data.kind=arithmetic data.operations=3",
        "data.kind=arithmetic data.too_long=drop", "policy.kind=scratch policy.layers=3", "warmup.steps=9",
        "rollout.prompts=65", "rollout.group_size=9", "rollout.shard_prompts=16", "rollout.sampling.top_p=0.9",
        "rollout.engine.kind=transformers rollout.engine.dtype=bfloat16", "scoring.timeout_seconds=9",
        'scoring.rewards=[{kind="math"}]',
        "algorithm.kind=rloo", "update.learning_rate=2e-6", "update.loss.kind=ppo_clip update.loss.clip_high=0.2",
        "update.kl.kind=k3", "update.correction.kind=none", "pools.update_ranks=2", "pools.threads=2",
        "evaluation.problems=9",
        "update.router_replay=rollout",
        "update.attention=eager",
        "update.attention=sdpa",
        "pools.update_ranks=2 update.sequence_parallel=2",
    ],
)  # fmt: skip
def test_what_results_depend_on_is_part_of_a_runs_identity(override):
    changed = override_config({}, override.split(), source="run.toml")
    assert changed.fingerprint() != RunConfig().fingerprint()


def test_a_key_that_stored_runs_did_not_have_is_in_no_identity_at_its_default():
    assert "router_replay" not in RunConfig().identity()["update"]


@pytest.mark.parametrize("override", ["algorithm.std=batch", "algorithm.advantage_clip=5"])
def test_keys_that_are_younger_than_stored_runs_are_in_no_identity_at_their_default(override):
    key = override.partition(".")[2].partition("=")[0]
    plain, changed = (
        override_config({}, ["algorithm.kind=grpo", *more], source="run.toml") for more in ([], [override])
    )
    assert plain.fingerprint() == RunConfig().fingerprint() != changed.fingerprint()
    assert key not in plain.identity()["algorithm"]
    assert parse_config(changed.identity(), source="run.json").fingerprint() == changed.fingerprint()
    assert key not in RecreditTerms(algorithm=plain.algorithm).model_dump(mode="json")["algorithm"]


def test_the_number_of_iterations_matters_where_the_schedule_reads_it():
    linear = ["update.schedule=linear"]
    short, long = (override_config({}, [*linear, f"iterations={n}"], source="run.toml") for n in (8, 9))
    assert short.fingerprint() != long.fingerprint()


def test_a_run_without_slices_is_the_one_that_was_begun_before_there_were_any_and_may_go_on_with_some():
    whole, sliced = (
        override_config({}, ["pools.update_ranks=2", f"update.sequence_parallel={slices}"], source="run.toml")
        for slices in (1, 2)
    )
    assert "sequence_parallel" not in whole.identity()["update"]
    assert whole.layout() == {"pools.update_ranks": 2, "pools.threads": 1, "update.zero_stage": 0}
    assert sliced.layout() == whole.layout() | {"update.sequence_parallel": 2}
    assert difference(whole.identity(), sliced.identity()) == "update.sequence_parallel was absent, is 2"
    assert difference(whole.identity(), sliced.identity(), besides=LAYOUT) == ""
    for one, other in ((whole, sliced), (sliced, whole)):
        assert one.laid_out(other.layout()).fingerprint() == other.fingerprint()
    assert sliced.laid_out({}) == sliced


def test_a_run_can_be_read_back_from_its_identity():
    config = override_config({}, ["name=x", "seed=5", "update.kl.kind=k3", "warmup.steps=3"], source="run.toml")
    again = parse_config({**config.identity(), "name": "x"}, source="run.json")
    assert again.fingerprint() == config.fingerprint()


# ---- files that extend others


def write_config(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_extends_another_key_by_key_and_another_kind_or_list_replaces_what_was_there(tmp_path):
    write_config(
        tmp_path / "base.toml",
        'extends = "first.toml"\n[policy]\nkind = "scratch"\nlayers = 3\n[update]\nminibatches = 2',
    )
    write_config(
        tmp_path / "first.toml", 'name = "first"\niterations = 7\n[update]\nminibatches = 8\nlearning_rate = 1e-4'
    )
    own = 'extends = "../base.toml"\nname = "own"\ntags = ["a"]\n[policy]\nheads = 8\n[update]\nbeta1 = 0.5'
    config = load_config(write_config(tmp_path / "jobs/own.toml", own), ["iterations=9"])
    assert (config.name, config.iterations, config.tags) == ("own", 9, ("a",))
    assert (config.policy.layers, config.policy.heads) == (3, 8)
    assert (config.update.minibatches, config.update.learning_rate, config.update.beta1) == (2, 1e-4, 0.5)
    other = 'extends = "base.toml"\n[policy]\nkind = "directory"\npath = "model"'
    found = load_config(write_config(tmp_path / "other.toml", other))
    assert found.policy.model_dump() == {"kind": "directory", "path": Path("model")}
    assert found.name == "first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "gone.toml"', r"no configuration file .*gone.toml, which .*own.toml extends \(looked in"),
        ("extends = 3", r"own.toml: extends: expected the path of a configuration, found 3"),
        ('extends = "own.toml"', r"own.toml: extends 'own.toml': the file extends itself"),
        ('extends = "loop.toml"', r"loop.toml: extends 'own.toml': the file extends itself, by way of .*own.toml"),
        ('extends = "torn.toml"', r"torn.toml is not TOML: "),
        ('extends = "typo.toml"', r"own.toml: .*iteratons.*iterations"),
    ],
)
def test_what_is_wrong_with_a_file_that_is_extended_is_said_of_it(tmp_path, text, message):
    write_config(tmp_path / "loop.toml", 'extends = "own.toml"')
    write_config(tmp_path / "torn.toml", "name =")
    write_config(tmp_path / "typo.toml", "iteratons = 3")
    with pytest.raises(BadInput, match=message) as raised:
        load_config(write_config(tmp_path / "own.toml", text))
    assert "\n" not in str(raised.value)


def test_every_variant_has_a_title_of_its_kind_and_what_it_is_that_no_other_of_the_same_choice_has():
    definitions = RunConfig.model_json_schema()["$defs"]
    titles = {name: each["title"] for name, each in definitions.items() if "kind" in each.get("properties", {})}
    assert titles["Grpo"] == "grpo: Reward minus the group's mean, over its standard deviation"
    assert titles["KlPenalty"].startswith("k1, k2, k3: Penalty on")
    for title in titles.values():
        assert re.fullmatch(r"[a-z0-9_]+(, [a-z0-9_]+)*: [A-Z1].*[^.]", title), title
    choices = [
        [titles[each["$ref"].rpartition("/")[2]] for each in field["oneOf"]]
        for definition in definitions.values()
        for field in definition.get("properties", {}).values()
        if "oneOf" in field and all("$ref" in each for each in field["oneOf"])
    ]
    assert len(choices) >= 5 and all(len({*choice}) == len(choice) for choice in choices)
