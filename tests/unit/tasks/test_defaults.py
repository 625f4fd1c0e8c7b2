"""Defaults that are reduced to the size of small data: only unset keys, once, and recorded by the run."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import create_run
from rheostat.models.inspection.problems import check_sizes
from rheostat.tasks.run.preflight import unset_keys, with_data_sized_defaults, with_recorded_defaults
from tests.support.configurations import accepted
from tests.support.demos import ArithmeticData

FEW = {"train_problems": 47.0, "max_prompts": 47.0, "heldout_problems": 3.0}


def test_unset_sizes_are_reduced_to_the_number_of_problems_and_reported():
    config, told = with_data_sized_defaults(accepted("data.kind=file", "data.path=a.jsonl"), FEW)
    assert (config.rollout.prompts, config.evaluation.problems) == (47, 3)
    assert told == [
        "rollout.prompts is 47 instead of its default 64, because there are 47 training problems.",
        "evaluation.problems is 3 instead of its default 256, because there are 3 held-out problems. To evaluate on "
        "more problems, raise data.heldout_fraction, or set data.heldout_path to another file. The paired test of "
        "`rheostat compare` and the gate of a retrain need at least 30 problems.",
    ]
    assert with_data_sized_defaults(config, FEW) == (config, []), "what was chosen once is chosen"


def test_unset_shard_and_minibatch_sizes_follow_the_number_of_prompts():
    two = FEW | {"train_problems": 2.0, "max_prompts": 2.0}
    config, _ = with_data_sized_defaults(accepted(), two)
    assert (config.rollout.prompts, config.rollout.shard_prompts, config.update.minibatches) == (2, 2, 2)
    config, _ = with_data_sized_defaults(accepted("rollout.shard_prompts=8", "update.minibatches=4"), two)
    assert (config.rollout.shard_prompts, config.update.minibatches) == (8, 4)
    alone, _ = with_data_sized_defaults(accepted("rollout.prompts=2"), two)
    assert (alone.rollout.shard_prompts, alone.update.minibatches) == (32, 4), "the prompts did not give way"


def test_a_set_value_stays_even_if_it_is_the_default_and_enough_problems_change_nothing():
    enough = {"train_problems": 64, "max_prompts": 64, "heldout_problems": 256}
    assert with_data_sized_defaults(accepted(), enough) == (accepted(), [])
    config = accepted("rollout.prompts=64", "evaluation.problems=256")
    assert unset_keys(config) == []
    assert with_data_sized_defaults(config, FEW) == (config, [])


def test_weights_may_allow_fewer_prompts_than_there_are_problems():
    config, [told] = with_data_sized_defaults(
        accepted("evaluation.problems=1"), FEW | {"train_problems": 90.0, "max_prompts": 10.0}
    )
    assert config.rollout.prompts == 10
    assert told.endswith("there are 90 training problems, and their weights allow no more.")


def test_a_run_continues_with_its_recorded_sizes_after_a_change_of_its_files(tmp_path):
    asked = accepted(f"store={tmp_path}", "name=few")
    assert with_recorded_defaults(asked) is asked, "there is no such run yet"
    begun, _ = with_data_sized_defaults(asked, FEW)
    run = create_run(begun.store, begun.name, begun.identity())
    assert with_recorded_defaults(asked) is asked, "a run without results is fitted to its files again"
    run.store.put("manifests/policy/base.json", b"")
    again, told = with_data_sized_defaults(
        with_recorded_defaults(asked), {"train_problems": 9e3, "max_prompts": 9e3, "heldout_problems": 9e3}
    )
    assert (again.identity(), told) == (begun.identity(), [])
    other = accepted(f"store={tmp_path}", "name=few", "rollout.prompts=64")
    assert with_recorded_defaults(other).rollout.prompts == 64, "what is asked for is compared with the record as ever"


def test_a_default_that_exceeds_the_problems_is_not_refused_and_a_set_value_is():
    few, data = {"max_prompts": 47.0, "heldout_problems": 3.0}, ArithmeticData()
    check_sizes(data, few, prompts=64, evaluated=256, giving_way=("rollout.prompts", "evaluation.problems"))
    with pytest.raises(BadInput, match=r"rollout.prompts is 64, but the data has only 47 training problems"):
        check_sizes(data, few, prompts=64, evaluated=3, giving_way=("evaluation.problems",))
    with pytest.raises(BadInput, match=r"evaluation.problems is 256, but only 3 problems are held out"):
        check_sizes(data, few, prompts=47, evaluated=256, giving_way=("rollout.prompts",))


def test_a_default_that_exceeds_the_generated_problems_is_reduced():
    made = accepted("data.options.heldout_problems=8")
    config, told = with_data_sized_defaults(made, {"train_problems": 4096, "max_prompts": 4096, "heldout_problems": 8})
    assert config.evaluation.problems == 8
    assert len(told) == 1
