"""Renamed keys and values of the configuration: the old spelling gives the same run, with one warning."""

import json
import tomllib
import warnings
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, ConfigDict

from rheostat.infra.errors import BadInput, DeprecatedSpelling, RunChanged
from rheostat.infra.renamed import RenamedFrom, RenamedValue
from rheostat.infra.store.runs import create_run, open_run
from rheostat.infra.terminal import command_app, run_command
from rheostat.infra.validation_errors import field_models
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import _HOW, RunConfig, load_config, override_config, parse_config
from tests.support.configurations import accepted, refusal
from tests.support.demos import ARITHMETIC, demo_part

UPGRADING = Path(__file__).parents[3] / "docs/upgrading.md"


class Case(BaseModel):
    """A renamed key or value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    old: str
    new: str
    more: tuple[str, ...] = ()
    names: tuple[str, str] = ("", "")

    @property
    def spellings(self):
        """Old and new spelling in the warning."""
        return self.names if any(self.names) else tuple(text.partition(" = ")[0] for text in (self.old, self.new))

    @property
    def leaves(self):
        """Old and new name of the key, or old and new value, without the tables that contain it."""
        return tuple(text.rpartition(" = ")[2].strip("'").rpartition(".")[2] for text in self.spellings)

    def document(self, *lines):
        return tomllib.loads("\n".join((*self.more, *lines)))


def read_case(case):
    """Read a case, and add data if the case names none."""
    more = case.get("more", [])
    has_data = any(line.startswith(("data.", "data ")) for line in (*more, case["old"]))
    return Case.model_validate(case | {"more": more if has_data else [f"data = {toml_value(ARITHMETIC)}", *more]})


CASES = [read_case(case) for case in tomllib.loads(Path(__file__).with_name("renamed.toml").read_text())["case"]]
BOTH_KEYS = [case for case in CASES if case.leaves[0] not in ("return", "arithmetic")]
WARNED = "ignore::rheostat.infra.errors.DeprecatedSpelling"
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.old.partition(" = ")[0])


def loaded(load, *arguments, **options):
    """Return a configuration, and the warnings about old names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load(*arguments, **options)
    return config, [str(each.message) for each in caught if issubclass(each.category, DeprecatedSpelling)]


def models_within(model, found):
    """Collect the classes of settings that a configuration can contain."""
    for field in () if model in found else model.model_fields.values():
        found.add(model)
        for inner in field_models(field):
            models_within(inner, found)
    return found


def test_the_table_and_the_documentation_list_every_renamed_key_and_value():
    marks = [
        (mark.key, name) if isinstance(mark, RenamedFrom) else (mark.old, mark.new)
        for model in models_within(RunConfig, set())
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, RenamedFrom | RenamedValue)
    ]
    assert {*marks} == {case.leaves for case in CASES}
    table = UPGRADING.read_text()
    assert [old for old, new in marks if f"{old}" not in table or f"{new}" not in table] == []


@each_case
def test_the_old_spelling_in_a_file_gives_the_same_run_and_one_warning(case, tmp_path):
    paths = [tmp_path / "old.toml", tmp_path / "new.toml"]
    for path, line in zip(paths, (case.old, case.new), strict=True):
        path.write_text("\n".join((*case.more, line)))
    (old, warned), (new, silent) = (loaded(load_config, path) for path in paths)
    assert (old, old.identity(), old.fingerprint()) == (new, new.identity(), new.fingerprint())
    before, after = case.spellings
    assert warned == [f"{paths[0]}: {before} is deprecated. Write {after}."]
    assert silent == []


@each_case
def test_the_old_spelling_in_an_override_gives_the_same_run_and_one_warning(case):
    old, warned = loaded(accepted, *case.more, case.old)
    new, silent = loaded(accepted, *case.more, case.new)
    assert (old, old.identity()) == (new, new.identity())
    before, after = case.spellings
    assert warned == [f"override {before} is deprecated. Write {after}."]
    assert silent == []


@pytest.fixture(scope="module")
def parameters_of_a_flow() -> dict[str, object]:
    """Schema with which Prefect checks the parameters of a flow that has a configuration."""

    def flow(config: RunConfig) -> None: ...

    return parameter_schema(flow).model_dump_for_openapi()


@each_case
def test_parameters_of_a_deployed_run_may_have_the_old_spelling(case, parameters_of_a_flow):
    document = case.document(case.old)
    assert validate({"config": document}, parameters_of_a_flow) == []
    config, warned = loaded(RunConfig.model_validate, document)
    assert config == RunConfig.model_validate(case.document(case.new))
    assert len(warned) == 1 and all(name in warned[0] for name in case.leaves)


@each_case
def test_a_run_records_the_old_spelling_and_continues_with_both(case, tmp_path):
    settings = (*case.more, "name=old", f"store={tmp_path}")
    config = accepted(*settings, case.new)
    identity = config.identity()
    is_identity = case.new.partition(" = ")[0].partition(".")[0] not in _HOW
    if is_identity:
        old, new = (f'"{leaf}"' for leaf in case.leaves)
        assert old in json.dumps(identity) and new not in json.dumps(identity)
    create_run(str(tmp_path), "old", identity)
    for line in (case.old, case.new):
        again, _ = loaded(accepted, *settings, line)
        open_run(str(tmp_path), "old").check_identity(again)
    document = {**identity, "name": "old", "store": str(tmp_path)}
    recorded, warned = loaded(parse_config, document, source="run old", recorded=True)
    assert (recorded.identity(), warned) == (identity, [])
    if is_identity:
        changed, warned = loaded(override_config, document, [case.new], source="run old", recorded=True)
        assert warned == [] and changed.identity() == identity


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("case", BOTH_KEYS, ids=lambda case: case.leaves[0])
def test_both_spellings_of_a_key_in_one_table_are_refused_by_name(case):
    def merged(old, new):
        if isinstance(old, list):
            return [merged(*pair) for pair in zip(old, new, strict=True)]
        return (
            {**old, **{k: merged(old[k], v) if k in old else v for k, v in new.items()}}
            if isinstance(old, dict)
            else old
        )

    with pytest.raises(
        BadInput, match=r"{} and {} are both set, but they are the same key".format(*case.leaves)
    ) as refused:
        parse_config(merged(case.document(case.old), case.document(case.new)), source="job.toml")
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings(WARNED)
def test_a_file_and_an_override_may_have_different_spellings(tmp_path):
    (tmp_path / "base.toml").write_text("warmup.worked_fraction = 0.1\ncontrollers.span = 7")
    job = tmp_path / "job.toml"
    job.write_text(f'extends = "base.toml"\ndata = {toml_value(ARITHMETIC)}\nwarmup.worked_answer_fraction = 0.2')
    assert load_config(job).warmup.worked_answer_fraction == 0.2
    config = load_config(job, ["warmup.worked_fraction=0.3", "controllers.iterations_per_flow_run="])
    assert (config.warmup.worked_answer_fraction, config.controllers.iterations_per_flow_run) == (0.3, 50)
    assert load_config(job, ["controllers.span="]).controllers.iterations_per_flow_run == 50


@pytest.mark.filterwarnings(WARNED)
def test_messages_have_the_present_names(tmp_path):
    assert "did you mean 'worked_answer_fraction'" in refusal("warmup.worked_fractio=1")
    assert "'data.similarity', which only kind = 'deduplicated' has" in refusal(
        "data.kind=file", "data.path=a.jsonl", "data.bound=0.5"
    )
    config = accepted("name=old", f"store={tmp_path}", "warmup.worked_fraction=0.5")
    create_run(str(tmp_path), "old", config.identity())
    with pytest.raises(RunChanged, match=r"warmup\.worked_answer_fraction was 0\.5, is 0\.6"):
        open_run(str(tmp_path), "old").check_identity(accepted("name=old", "warmup.worked_answer_fraction=0.6"))


class Sums(demo_part("paint/paintings:PaintingsData")):
    """A user's own source of problems."""


def test_options_of_a_class_of_a_user_may_have_the_old_spelling(tmp_path):
    options = {"lies": 0.125, "without": "ids.txt"}
    document = {
        "data": {"kind": "target", "target": f"{__name__}:Sums", "options": options},
        "evaluation": {"problems": 24},
    }
    config, warned = loaded(parse_config, document, source="job.toml")
    assert (config.data.caption_noise, len(warned)) == (0.125, 2)
    assert {"lies", "without"} <= {*config.identity()["data"]["options"]}
    again, warned = loaded(parse_config, config.identity(), source="run", recorded=True)
    assert (again.identity(), warned) == (config.identity(), [])


def test_a_command_prints_one_line_for_each_old_name(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(
        f"data = {toml_value(ARITHMETIC)}\n"
        "alarms = [{ kind = 'kl', returns = 1, bound = 1 }, { kind = 'reward_dip', returns = 2 }]\ncontrollers.span = 3"
    )

    def load() -> None:
        """Load the job twice."""
        for _ in range(2):
            load_config(job, ["algorithm={kind='grpo',kl={kind='k1'}}", "warmup.worked_fraction=1"])

    app = command_app("rheostat", "Load.", version="0")
    app.command(load)
    assert run_command(app, ["load"], again="") == 0
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {job}: alarms.returns is deprecated. Write alarms.max_reverts.",
        f"warning: {job}: controllers.span is deprecated. Write controllers.iterations_per_flow_run.",
        "warning: override warmup.worked_fraction is deprecated. Write warmup.worked_answer_fraction.",
    ]
