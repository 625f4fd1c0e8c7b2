"""Keys that stored runs may lack: each has the version that introduced it, and the value that means "as before"."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from pydantic import BaseModel, Field

from rheostat.infra.config import Settings, Since, adopt_recorded, encode_recorded, read_recorded, since_of
from rheostat.infra.demos import FORMER_DATA_KINDS, FORMER_POLICY_KINDS
from rheostat.infra.errors import RunChanged
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.chain import Link
from rheostat.infra.store.dependencies import DependencyRecord
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.run_record import RunRecord
from rheostat.infra.store.runs import create_run, open_run
from rheostat.infra.store.tombstones import Deleted
from rheostat.models.config.retriever import RetrieverConfig
from rheostat.models.config.soup import SoupConfig
from rheostat.tasks.config.run import _HOW, LAYOUT, RunConfig
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.iteration import CarryOver
from rheostat.tasks.run.preflight import with_recorded_defaults
from rheostat.tasks.run.rescorings import RecreditTerms, RescoringTerms
from rheostat.tasks.run.solve_rates import SolveRates
from rheostat.tasks.soup.record import SoupRecord
from tests.support.configurations import accepted
from tests.support.demos import demo_part

KEYS = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())
CHANGELOG = Path(__file__).parents[3] / "CHANGELOG.md"
RECORDS = (
    *(BatchPlan, CarryOver, Deleted, DependencyRecord, Link, Manifest, RunRecord),
    *(RecreditTerms, RescoringTerms, RetrieverConfig, SoupConfig, SoupRecord, SolveRates),
)


def settings_in(annotation):
    """Yield the classes of settings that a type consists of, not those inside these classes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "variants", ())):
        yield from settings_in(part)


def recorded_models(*roots):
    """Return every class of settings that these classes consist of, by name."""
    waiting = [*roots]
    found = dict[str, type[BaseModel]]()
    while waiting:
        model = waiting.pop()
        assert found.setdefault(model.__name__, model) is model, f"two classes are called {model.__name__}"
        for name, field in model.model_fields.items():
            if model is RunConfig and name in _HOW:
                continue
            parts = [each for part in (field.annotation, *field.metadata) for each in settings_in(part)]
            waiting += [part for part in parts if found.get(part.__name__) is not part]
    return found


FORMER_KINDS = [*map(demo_part, {*FORMER_DATA_KINDS.values(), *FORMER_POLICY_KINDS.values()})]
"""Classes in demonstrations that stored runs name by a former `kind`."""
MODELS = recorded_models(*RECORDS, RunConfig, *FORMER_KINDS)


def recorded_name(name, field):
    """Return the name of a key in stored runs."""
    return next((mark.key for mark in field.metadata if isinstance(mark, RenamedFrom)), name)


def test_every_key_that_stored_runs_may_lack_is_marked():
    for name, model in MODELS.items():
        assert name in KEYS, f"{name} is new: list its keys in tests/unit/tasks/keys.toml"
        young = [
            key
            for key, field in model.model_fields.items()
            if recorded_name(key, field) not in KEYS[name]
            and since_of(field) is None
            and not (model is RunConfig and key in _HOW)
        ]
        assert not young, (
            f"{name}.{young[0]}: stored runs lack this key. Write Annotated[TYPE, Since(VERSION, before=VALUE)], "
            "where VALUE has a run compute what runs computed before the key existed"
        )


def test_no_key_of_a_stored_run_is_unknown_today():
    for name, keys in KEYS.items():
        assert name in MODELS, f"{name}: stored runs have this table; a reader for it is needed"
        known = {recorded_name(key, field) for key, field in MODELS[name].model_fields.items()}
        known |= {"kind"} if MODELS[name] in FORMER_KINDS else set()
        assert not {*keys} - known, f"{name}: stored runs have keys without a reader"


def test_marks_name_versions_of_the_changelog():
    released = {*re.findall(r"^## (\S+)", CHANGELOG.read_text(), re.MULTILINE)}
    marks = [mark for model in MODELS.values() for f in model.model_fields.values() if (mark := since_of(f))]
    assert marks and {mark.version for mark in marks} <= released


# ---- one mechanism, with a key whose default is not what runs did before
class Plain(Settings):
    kind: Literal["plain"] = "plain"


class Rule(Settings):
    kind: Literal["rule"] = "rule"
    sharpness: Annotated[int, Field(ge=0), Since("0.2.0", before=1)] = 5


class Job(Settings):
    rules: tuple[Annotated[Plain | Rule, Field(discriminator="kind")], ...] = (Plain(), Rule())
    limit: Annotated[Rule | None, Since("0.2.0", before=None)] = Rule()


BEFORE = {"rules": [{"kind": "plain"}, {"kind": "rule"}]}
"""Settings that a version without `sharpness` and `limit` recorded."""


def test_settings_that_an_older_version_recorded_keep_their_meaning():
    job = read_recorded(Job, BEFORE)
    assert (job.rules[1].sharpness, job.limit) == (1, None)
    assert Job.model_validate(BEFORE) == Job() != job, "a user's document has the default"


def test_a_value_with_the_meaning_of_a_missing_key_is_not_recorded_and_other_values_are():
    assert read_recorded(Job, BEFORE).as_recorded() == BEFORE
    assert Job().as_recorded() == Job().model_dump(mode="json")
    explicit = read_recorded(Job, BEFORE).model_dump(mode="json")
    assert encode_recorded(explicit, Job()) == BEFORE, "as a version recorded that did not leave keys out"


def test_an_unset_key_has_its_old_meaning_in_a_run_recorded_without_the_key():
    assert adopt_recorded(Job(), BEFORE) == read_recorded(Job, BEFORE)
    chosen = Job(rules=(Plain(), Rule(sharpness=7)))
    assert adopt_recorded(chosen, BEFORE).rules == chosen.rules
    assert adopt_recorded(Job(), {"rules": [], "limit": None}) == Job(), "other shapes are left to the comparison"


def test_a_run_older_than_a_key_continues_and_refuses_another_value_of_the_key(tmp_path):
    config = accepted("name=old", f"store={tmp_path}", 'scoring.rewards=[{kind="math"}]')
    recorded = config.identity()
    assert "scale" not in recorded["scoring"]["rewards"][0] and "staleness" not in recorded["rollout"]
    recorded["rollout"]["staleness"] = 0  # as a version recorded that did not leave keys out
    create_run(str(tmp_path), "old", recorded)
    open_run(str(tmp_path), "old").check_identity(with_recorded_defaults(config), ignored=LAYOUT)
    other = accepted("name=old", f"store={tmp_path}", 'scoring.rewards=[{kind="math", scale=2}]')
    with pytest.raises(RunChanged, match=r"scoring\.rewards"):
        open_run(str(tmp_path), "old").check_identity(with_recorded_defaults(other), ignored=LAYOUT)
