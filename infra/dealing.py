"""Deal slots to roles so that as few workers as possible move. Pure functions."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from infra.errors import BadInput


@dataclass(frozen=True, slots=True)
class Post:
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

    out: tuple[Post, ...]
    into: tuple[Post, ...]


def deal(
    current: Sequence[Post], wanted: Mapping[str, int], *, widths: Mapping[str, int], slots: int, asleep: Set[Post]
) -> set[Post]:
    """Choose a post for every wanted worker.

    `current` lists the posts that are awake, those to be kept longest first. New ones go, the widest first, to free
    slots, where possible to a post where a worker sleeps. If no gap is wide enough, all are dealt anew.
    """
    needed = sum(count * widths[role] for role, count in wanted.items())
    if needed > slots:
        raise BadInput(f"{dict(wanted)} needs {needed} slots, there are {slots}")
    left = dict(wanted)
    dealt: set[Post] = set()
    for post in current:
        if left.get(post.role, 0) > 0:
            left[post.role] -= 1
            dealt.add(post)
    order = sorted((role for role in left for _ in range(left[role])), key=lambda role: (-widths[role], role))
    for role in order:
        gap = _gap(role, widths[role], dealt=dealt, slots=slots, asleep=asleep)
        if gap is None:
            return _packed(wanted, widths=widths)
        dealt.add(gap)
    return dealt


def changes(current: Set[Post], target: Set[Post]) -> list[Change]:
    """Split the way from one deal to another into changes that have no slot in common."""
    groups: list[tuple[set[int], list[Post]]] = []
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


def _gap(role: str, width: int, *, dealt: Set[Post], slots: int, asleep: Set[Post]) -> Post | None:
    taken = {slot for post in dealt for slot in post.slots}
    gaps = [Post(role, first, width) for first in range(slots - width + 1)]
    free = [post for post in gaps if not taken.intersection(post.slots)]
    return min(free, key=lambda post: (post not in asleep, post.first), default=None)


def _packed(wanted: Mapping[str, int], *, widths: Mapping[str, int]) -> set[Post]:
    packed, first = set(), 0
    for role in sorted(wanted, key=lambda role: (-widths[role], role)):
        for _ in range(wanted[role]):
            packed.add(Post(role, first, widths[role]))
            first += widths[role]
    return packed
