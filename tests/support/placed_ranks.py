"""Rank that reports its machine and its GPUs, which need not exist."""

import os
from pathlib import Path


class PlacedRank:
    """Rank of a group that needs no process group."""

    def __init__(self) -> None:
        self.rank = -1

    def progress(self) -> int:
        return 0

    def join(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        self.rank = rank

    def report(self, work: tuple[Path, bool]) -> int:
        """Write the Ray node and the visible GPUs of this rank to a file in a folder. If a kill is requested, rank 1
        first kills its process once."""
        import ray

        folder, is_killed = work
        if is_killed and self.rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), 9)
        place = f"{ray.get_runtime_context().get_node_id()} {os.environ['CUDA_VISIBLE_DEVICES']}"
        (folder / f"rank-{self.rank}").write_text(place)
        return self.rank
