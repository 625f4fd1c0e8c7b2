"""Order in which the turns of an episode are shown: as a tree, in which a branch follows the turn that it continues."""

from collections import defaultdict
from collections.abc import Sequence


def arrange_turns(links: Sequence[tuple[int | None, int | None]]) -> list[tuple[int, int]]:
    """Return the position in `links` and the depth of each turn, in the order to show them.

    A link is the order of a turn in time and the order of the turn that it continues, or None. The first turn that
    continues a turn has the depth of that turn. Further ones begin branches, which are shown before it and one level
    deeper. Turns without an order keep their positions.
    """
    orders = {order for order, _ in links if order is not None}
    children: dict[int | None, list[int]] = defaultdict(list)
    for position in sorted(range(len(links)), key=lambda position: links[position][0] or 0):
        parent = links[position][1]
        children[parent if parent in orders else None].append(position)
    arranged = list[tuple[int, int]]()
    waiting = [(position, 0) for position in reversed(children[None])]
    while waiting:
        position, depth = waiting.pop()
        arranged.append((position, depth))
        order = links[position][0]
        following = [] if order is None else children[order]
        waiting += [(each, depth) for each in following[:1]]
        waiting += [(each, depth + 1) for each in reversed(following[1:])]
    return arranged
