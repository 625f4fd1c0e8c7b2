"""How the ranks of the update meet, and what they tell each other.

DeepSpeed chooses its accelerator when it is imported, so it is imported here and in the trainer only once a rank joins.
"""

import logging
import os
import socket
import warnings
from dataclasses import dataclass, replace
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from infra.errors import BadInput
from infra.pools.forks import THREADED, hide_modules
from models.modeling.slices import Slicing


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks."""

    rank: int
    world_size: int
    device: torch.device
    slicing: Slicing | None = None
    """Those that read the same passes as this one, each a slice; none where each has passes of its own."""

    @property
    def parts(self) -> int:
        """Parts of a step: its ranks, those that read the same passes counted once."""
        return self.world_size if self.slicing is None else self.world_size // self.slicing.size

    @property
    def part(self) -> int:
        """Which of them is this rank's."""
        return self.rank if self.slicing is None else self.rank // self.slicing.size

    @property
    def counts(self) -> bool:
        """Whether what it says of its passes counts: among ranks that read the same ones that of the first does."""
        return self.slicing is None or self.slicing.place == 0

    @property
    def apart(self) -> "Ranks":
        """The same ranks, each with passes of its own."""
        return replace(self, slicing=None)


def join_ranks(rank: int, world_size: int, *, address: str, port: int, slices: int = 1) -> Ranks:
    """Enter the process group; returns when all ranks have. Loopback addresses keep every socket on the loopback.

    As many consecutive ranks as there are `slices` read the same passes. A process that is in a group stays there:
    joining as the same rank again is free, as another is refused.
    """
    has_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu else "cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ.setdefault("LOCAL_RANK", "0")
    if ip_address(socket.gethostbyname(address)).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise BadInput(
                f"update rank {rank} of {world_size}: this process is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} already; another group needs another process"
            )
        return Ranks(rank=rank, world_size=world_size, device=device, slicing=_slicing(slices))
    # torch deprecates collectives that DeepSpeed still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=_meeting_place(rank, world_size, address=address, port=port),
        rank=rank,
        world_size=world_size,
    )
    _start_deepspeed()
    return Ranks(rank=rank, world_size=world_size, device=device, slicing=_slicing(slices))


def _slicing(slices: int) -> Slicing | None:
    if slices == 1:
        return None
    group, _ = dist.new_subgroups(group_size=slices)  # type: ignore[no-untyped-call]
    return Slicing(group=group, size=slices, place=dist.get_rank(group))


def sum_and_max(sums: Tensor, maxima: Tensor, ranks: Ranks) -> None:
    """Replace both by their sum and maximum over the ranks, those that read the same passes counted once."""
    if not ranks.counts:
        sums.zero_()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)


def sum_over_ranks(sums: Tensor) -> None:
    """Replace it by its sum over the ranks."""
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Bring every rank's bytes to rank 0, one rank after another; the others get an empty list."""
    size = torch.tensor([len(data)], device=ranks.device)
    if ranks.rank:
        dist.send(size, 0)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(ranks.device), 0)
        return []
    gathered = [data]
    for source in range(1, ranks.world_size):
        dist.recv(size, source)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=ranks.device)
        if size:
            dist.recv(buffer, source)
        gathered.append(buffer.cpu().numpy().tobytes())
    return gathered


def broadcast_bytes(data: bytes, ranks: Ranks) -> bytes:
    """Give rank 0's bytes to every rank."""
    size = torch.tensor([len(data)], device=ranks.device)
    dist.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is set on any rank."""
    raised = torch.tensor([int(flag)], device=ranks.device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised)


def _meeting_place(rank: int, world_size: int, *, address: str, port: int) -> Store:
    """Rank 0 listens on the given address alone; left to itself, torch would listen on all interfaces."""
    if rank:
        return TCPStore(address, port, world_size, is_master=False)
    listener = socket.create_server((address, port))
    return TCPStore(address, port, world_size, is_master=True, master_listen_fd=listener.detach())


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _start_deepspeed() -> None:
    with hide_modules(*THREADED):  # importing MLflow takes as long as the rest of DeepSpeed
        import deepspeed
        import deepspeed.ops

    logger = logging.getLogger("DeepSpeed")  # it writes to stdout by itself; only errors are news
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.ERROR)
    # Only consulted for the shared-memory all-reduce, which would be compiled with g++ here; gloo does as well.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_init_required=False)
