"""Deal slots to roles so that as few workers as possible move. Pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from infra.errors import BadInput


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's place: `width` slots from `first` on."""

    role: str
    first: int
    width: int

    @property
    def slots(self) -> range:
        """Slots that it takes."""
        return range(self.first, self.first + self.width)


@dataclass(frozen=True, slots=True)
class Change:
    """Workers that leave, and those that come to the same slots when all of them have left."""

    out: tuple[Assignment, ...]
    into: tuple[Assignment, ...]


def assign_slots(
    current: Sequence[Assignment],
    wanted: Mapping[str, int],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str],
    asleep: Set[Assignment],
    lost: frozenset[int] = frozenset(),
) -> set[Assignment]:
    """Choose a post for every wanted worker; `nodes` names the node of each slot, and no post lies on two.

    No post lies on a `lost` slot.
    `current` lists the posts that are awake, those to be kept longest first. New ones go, the widest first, to free
    slots, where possible to a post where a worker sleeps. If no gap is wide enough, all are dealt anew.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if min(wanted.values(), default=0) < 0:
        raise BadInput(f"expected numbers of workers from 0 on, got {dict(wanted)}")
    if needed > len(nodes) - len(lost):
        raise BadInput(f"{dict(wanted)} needs {needed} slots, there are {len(nodes) - len(lost)}")
    left = Counter(wanted)
    kept: set[Assignment] = set()
    for post in current:
        if left[post.role] > 0 and not lost.intersection(post.slots):
            left[post.role] -= 1
            kept.add(post)
    free = [None if slot in lost else node for slot, node in enumerate(nodes)]
    dealt = _placed(left, kept, widths=widths, nodes=free, asleep=asleep)
    dealt = _placed(Counter(wanted), set(), widths=widths, nodes=free, asleep=set()) if dealt is None else dealt
    if dealt is None:
        raise BadInput(f"{dict(wanted)} with {dict(widths)} slots a worker does not fit the nodes {list(nodes)}")
    return dealt


def assign_fewer(
    current: Sequence[Assignment],
    wanted: Mapping[str, int],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str],
    asleep: Set[Assignment],
    lost: frozenset[int],
) -> set[Assignment] | None:
    """As `assign_slots` where slots are lost: roles that take most of them give up workers until the rest fit.

    None if not even one worker of every wanted role fits.
    """
    fewer = dict(wanted)
    while True:
        try:
            return assign_slots(current, fewer, widths=widths, nodes=nodes, asleep=asleep, lost=lost)
        except BadInput:
            giving = [role for role, count in fewer.items() if count > 1]
            if not lost or not giving:
                if lost:
                    return None
                raise
            fewer[max(giving, key=lambda role: (fewer[role] * widths[role], role))] -= 1


def changes(current: Set[Assignment], target: Set[Assignment]) -> list[Change]:
    """Split the way from one assignment to another into changes that have no slot in common."""
    groups: list[tuple[set[int], list[Assignment]]] = []
    for post in sorted(current ^ target, key=lambda post: post.first):
        taken, posts = set(post.slots), [post]
        for group in [group for group in groups if group[0] & taken]:
            groups.remove(group)
            taken, posts = taken | group[0], group[1] + posts
        groups.append((taken, posts))
    return [
        Change(tuple(post for post in posts if post in current), tuple(post for post in posts if post in target))
        for _, posts in groups
    ]


def _placed(
    left: Counter[str],
    kept: Set[Assignment],
    *,
    widths: Mapping[str, int],
    nodes: Sequence[str | None],
    asleep: Set[Assignment],
) -> set[Assignment] | None:
    """Add posts to those kept, the widest first; without any kept this leaves no gaps on a node."""
    dealt = set(kept)
    for role in sorted(left.elements(), key=lambda role: (-widths[role], role)):
        taken = {slot for post in dealt for slot in post.slots}
        gaps = [Assignment(role, first, widths[role]) for first in range(len(nodes) - widths[role] + 1)]
        free = [gap for gap in gaps if not taken.intersection(gap.slots) and _on_one({nodes[at] for at in gap.slots})]
        if not free:
            return None
        dealt.add(min(free, key=lambda gap: (gap not in asleep, gap.first)))
    return dealt


def _on_one(nodes: Set[str | None]) -> bool:
    return len(nodes) == 1 and None not in nodes
