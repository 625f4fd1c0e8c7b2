"""A whole run with dynamic sampling and partial rollouts."""

import pyarrow as pa
import pytest

from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.views.export import export_tables
from tests.support.jobs import manifest_of
from tests.support.stored_runs import open_tiny

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]


@pytest.fixture
def waves(undisturbed):
    """Run whose iterations have two waves and carry unfinished groups over to the next iteration."""
    return undisturbed("waves")


def test_verify_accepts_a_run_in_waves(waves):
    verified = waves.command("verify")
    assert verified.code == 0, verified.output


def test_unfinished_groups_continue_first_in_the_next_iteration(waves):
    left = [groups["rollouts"] for groups in manifest_of(waves.run, "it-0001/seal")["detail"]["carried"]]
    following = manifest_of(waves.run, "it-0002/plan")["detail"]
    assert left
    assert following["carried"] == left
    continued = [manifest_of(waves.run, key)["digest"] for key in left]
    for shard, digest in enumerate(continued):
        rollouts = manifest_of(waves.run, f"it-0002/rollout/{shard:04d}")
        assert digest in rollouts["parents"]


def test_an_iteration_with_too_few_informative_groups_has_another_wave(waves):
    plans = [path.parent.name for path in waves.run.glob("manifests/it-*/wave-*/plan.json")]
    assert "wave-2" in plans


def test_an_export_marks_informative_and_trained_groups(waves):
    run = open_tiny(waves)
    for number in (1, 2, 3):
        rows = pa.concat_tables(export_tables(run, number)).to_pylist()
        marked = {row["prompt_row"] for row in rows if row["group_informative"]}
        trained = {row["prompt_row"] for row in rows if row["advantages"] is not None}
        before = {row for groups in Iteration(run, number).start_state.leftover_groups for row in groups.rows}
        counted = manifest_of(waves.run, f"it-{number:04d}/seal")["metrics"]
        assert len(marked) + len(before) == counted["credit/informative_groups"]
        assert trained <= marked and len(trained | before) >= counted["credit/trained_groups"]
