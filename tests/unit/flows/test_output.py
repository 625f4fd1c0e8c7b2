"""Lines of the command line about what was deleted, and about episodes."""

from rheostat.flows.cli.output import deletion_lines, rollout_text
from rheostat.infra.store.tombstones import Tombstone
from rheostat.models.rollouts.groups import TurnRecord
from rheostat.models.rollouts.preview import RolloutPreview


def test_deleted_policies_states_and_rollouts_are_counted_by_their_kind():
    deleted = [
        Tombstone(
            what=what, why="[retention]", who=f"me at {number}", when=str(number), is_bundle=False, is_replaced=False
        )
        for number, what in enumerate(["policies/0a", "states/1b", "states/2c", "it-0001"])
    ]
    assert deletion_lines(deleted) == [
        "deleted 1 policy and 2 optimizer states and rollouts of 1 iteration by [retention] (last by me at 3)"
    ]


def test_turns_of_branches_are_listed_as_a_tree_with_the_turns_that_they_continue():
    turns = [
        TurnRecord(tokens=2, observation=1, order=0),
        TurnRecord(tokens=3, order=2, parent=0, replayed=True),
        TurnRecord(tokens=1, order=1),
    ]
    sample = RolloutPreview.model_construct(
        iteration=1, prompt_id="id", sample=0, reward=None, tokens=7, finish_reason="stop", answer=None, images=(),
        turns=tuple(turns), prompt="", completion="",
    )  # fmt: skip
    assert [line for line in rollout_text(sample).splitlines() if line.startswith("turn")] == [
        "turn 1: 2 tokens generated, 1 token of observation, fresh prompt",
        "turn 3: 3 tokens generated, 0 tokens of observation, continues turn 1, replayed",
        "turn 2: 1 token generated, 0 tokens of observation, fresh prompt",
    ]
