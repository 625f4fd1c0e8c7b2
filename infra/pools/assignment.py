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
) -> set[Assignment]:
    """Choose a post for every wanted worker; `nodes` names the node of each slot, and no post lies on two.

    `current` lists the posts that are awake, those to be kept longest first. New ones go, the widest first, to free
    slots, where possible to a post where a worker sleeps. If no gap is wide enough, all are dealt anew.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if min(wanted.values(), default=0) < 0:
        raise BadInput(f"expected numbers of workers from 0 on, got {dict(wanted)}")
    if needed > len(nodes):
        raise BadInput(f"{dict(wanted)} needs {needed} slots, there are {len(nodes)}")
    left = Counter(wanted)
    kept: set[Assignment] = set()
    for post in current:
        if left[post.role] > 0:
            left[post.role] -= 1
            kept.add(post)
    dealt = _placed(left, kept, widths=widths, nodes=nodes, asleep=asleep)
    dealt = _placed(Counter(wanted), set(), widths=widths, nodes=nodes, asleep=set()) if dealt is None else dealt
    if dealt is None:
        raise BadInput(f"{dict(wanted)} with {dict(widths)} slots a worker does not fit the nodes {list(nodes)}")
    return dealt


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
    nodes: Sequence[str],
    asleep: Set[Assignment],
) -> set[Assignment] | None:
    """Add posts to those kept, the widest first; without any kept this leaves no gaps on a node."""
    dealt = set(kept)
    for role in sorted(left.elements(), key=lambda role: (-widths[role], role)):
        taken = {slot for post in dealt for slot in post.slots}
        gaps = [Assignment(role, first, widths[role]) for first in range(len(nodes) - widths[role] + 1)]
        free = [gap for gap in gaps if not taken.intersection(gap.slots) and len({nodes[at] for at in gap.slots}) == 1]
        if not free:
            return None
        dealt.add(min(free, key=lambda gap: (gap not in asleep, gap.first)))
    return dealt
