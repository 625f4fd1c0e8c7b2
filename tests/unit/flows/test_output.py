"""Lines of the command line about what was deleted."""

from rheostat.flows.cli.output import deletion_lines
from rheostat.infra.store.tombstones import Tombstone


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
