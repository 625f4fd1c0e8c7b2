"""Order in which the turns of an episode with branches are shown."""

from rheostat.tasks.views.turns import arrange_turns


def test_a_branch_follows_the_turn_that_it_continues_one_level_deeper():
    #     0 - 2 - 5    a chain, with a branch at 0 and one at 2
    #     |   ` 6 - 7
    #     ` 3 - 8
    #     1 - 4        a chain of another prompt
    parents = {0: None, 1: None, 2: 0, 3: 0, 4: 1, 5: 2, 6: 2, 7: 6, 8: 3}
    stored = [0, 2, 5, 1, 4, 3, 8, 6, 7]
    arranged = arrange_turns([(order, parents[order]) for order in stored])
    tree = [(stored[position], depth) for position, depth in arranged]
    assert tree == [(0, 0), (3, 1), (8, 1), (2, 0), (6, 1), (7, 1), (5, 0), (1, 0), (4, 0)]


def test_turns_without_an_order_keep_their_positions():
    assert arrange_turns([(None, None)] * 3) == [(0, 0), (1, 0), (2, 0)]
    assert arrange_turns([]) == []


def test_a_turn_whose_parent_is_missing_is_shown_as_a_new_prompt():
    assert arrange_turns([(1, 0), (2, 1)]) == [(0, 0), (1, 0)]
