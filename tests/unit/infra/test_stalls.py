"""Workers without progress: a worker that waits for another one that makes progress does not count as stalled."""

import pytest

from rheostat.infra.pools import stalls
from rheostat.infra.pools.host import ProcessPlace, Returned
from rheostat.infra.pools.ranks import RankGroup
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.pools.worker import PoolSpec


@pytest.fixture
def now(monkeypatch):
    """Time in seconds that the clock reads, in a list of one element."""
    seconds = [100.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_clock_starts_again_whenever_one_of_its_workers_has_made_progress(now):
    clock = StallClock(10)
    for seconds, worker, count, remaining in (
        (4, "rank-0", 0, 10),  # the first report
        (3, "rank-0", 0, 7),
        (1, "rank-1", 5, 10),
        (9, "rank-1", 5, 1),
        (0, "rank-0", 1, 10),
        (10, "rank-1", 5, 0),
        (1, "rank-0", 1, -1),
        (1, "rank-0", 0, 10),  # a new process counts from 0
    ):
        now[0] += seconds
        clock.report(worker, count)
        assert clock.remaining == remaining


class ClockedRank:
    """Rank that records the clocks of its calls. It starts itself."""

    is_owned = False
    place = ProcessPlace(1, 0.0, node="here", host="here", address="127.0.0.1", job="here")

    def __init__(self, name):
        self.name, self.clocks = name, []

    async def free_port(self):
        return 1

    async def perform(self, method, *arguments, clock):
        self.clocks.append(clock)
        return Returned("done", 0.0)


class ClockedRanks:
    """Launcher of ranks that record their clocks."""

    def __init__(self):
        self.ranks = []

    async def list_generations(self, role):
        return {}

    async def start(self, spec, name, *, slot):
        self.ranks.append(ClockedRank(name))
        return self.ranks[-1]


async def test_all_ranks_of_a_group_share_the_clock_of_a_work_unit():
    launcher = ClockedRanks()
    group = RankGroup(PoolSpec("update", "a:B", size=3, start_seconds=60, stall_seconds=5), launcher)
    await group.open()
    for _ in range(2):
        await group.run("update", None, returns=str)
    joins, *works = zip(*(rank.clocks for rank in launcher.ranks), strict=True)
    assert [clock.seconds for clock in joins] == [60] * 3
    assert [{clock.seconds for clock in clocks} for clocks in works] == [{5}] * 2
    assert len({id(clock) for clocks in (joins, *works) for clock in clocks}) == 3
    await group.close()
