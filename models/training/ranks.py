"""Process group of the update ranks, and the collective operations between them.

DeepSpeed chooses its accelerator when it is imported. Therefore this module and the trainer import DeepSpeed only when
a rank joins the process group.
"""

import logging
import os
import socket
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rheostat.infra.errors import BadInput
from rheostat.infra.pools.forks import THREADED_MODULES, hide_modules
from rheostat.infra.store.bundles import BundledFile, Contents
from rheostat.models.engines.device import choose_device
from rheostat.models.modeling.sequence_parallel import SequenceParallelGroup

COLLECTIVE_TIMEOUT: Final = timedelta(days=1)
"""Maximum time for which NCCL waits in a collective operation. The default of 10 minutes would end ranks that wait
while rank 0 writes a large model. The driver process detects stalled ranks (`pools.stall_seconds`)."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this process among the update ranks, which are the processes that train one model together."""

    rank: int
    world_size: int
    device: torch.device
    sequence_parallel_group: SequenceParallelGroup | None = None
    """Ranks that share the tokens of each row with this rank, or None if sequence parallelism is off."""

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, which process different micro-batches. A sequence-parallel group counts as
        one."""
        return (
            self.world_size
            if self.sequence_parallel_group is None
            else self.world_size // self.sequence_parallel_group.size
        )

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among the data-parallel ranks. The ranks of a sequence-parallel group have the same
        index."""
        return self.rank if self.sequence_parallel_group is None else self.rank // self.sequence_parallel_group.size

    @property
    def repeats_exactly(self) -> bool:
        """Whether the same update gives the same bits each time. On GPUs it does not, since the default kernels of CUDA
        add numbers in a varying order."""
        return self.device.type == "cpu"

    @property
    def reports_metrics(self) -> bool:
        """Whether this rank contributes to summed metrics.
        In a sequence-parallel group only the first rank does, so nothing is counted twice.
        """
        return self.sequence_parallel_group is None or self.sequence_parallel_group.rank == 0

    @property
    def without_sequence_parallelism(self) -> "Ranks":
        """Copy of this object with sequence parallelism off, so that each rank processes its own micro-batches."""
        return replace(self, sequence_parallel_group=None)


def join_ranks(rank: int, world_size: int, *, address: str, port: int, sequence_parallel: int = 1) -> Ranks:
    """Join the process group of the update ranks, and return when all ranks have joined. Each `sequence_parallel`
    consecutive ranks form a sequence-parallel group.

    A loopback address keeps all sockets on loopback. A process stays in its group: joining again as the same rank has
    no effect, and joining as another rank raises BadInput.
    """
    has_gpu = choose_device() == "cuda"
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu else "cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ.setdefault("LOCAL_RANK", "0")
    if ip_address(socket.gethostbyname(address)).is_loopback:
        os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _find_loopback_interface())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise BadInput(
                f"this process was started as update rank {rank} of {world_size}, but it is already rank "
                f"{dist.get_rank()} of {dist.get_world_size()} in another group. Start a new process for each group"
            )
        return Ranks(
            rank=rank,
            world_size=world_size,
            device=device,
            sequence_parallel_group=_build_sequence_parallel_group(sequence_parallel),
        )
    # torch deprecates collectives that DeepSpeed still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=_open_rendezvous(rank, world_size, address=address, port=port),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT if has_gpu else None,
    )
    _start_deepspeed()
    return Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        sequence_parallel_group=_build_sequence_parallel_group(sequence_parallel),
    )


def _build_sequence_parallel_group(sequence_parallel: int) -> SequenceParallelGroup | None:
    if sequence_parallel == 1:
        return None
    timeout = COLLECTIVE_TIMEOUT if torch.cuda.is_available() else None
    group, _ = dist.new_subgroups(group_size=sequence_parallel, timeout=timeout)  # type: ignore[no-untyped-call]
    return SequenceParallelGroup(group=group, size=sequence_parallel, rank=dist.get_rank(group))


def sum_and_max(sums: Tensor, maxima: Tensor, ranks: Ranks) -> None:
    """Replace `sums` by its sum and `maxima` by its maximum over all ranks, in place. A sequence-parallel group
    contributes to sums only once. Collective: every rank must call this with tensors of the same shapes."""
    if not ranks.reports_metrics:
        sums.zero_()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)


def sum_over_ranks(sums: Tensor) -> None:
    """Replace a tensor by its sum over all ranks, in place. Collective: every rank must call this."""
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Send the bytes of all ranks to rank 0. Returns them in rank order on rank 0 and an empty list on other ranks.
    Collective: every rank must call this."""
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
    """Send the bytes of rank 0 to every rank and return them. Collective: every rank must call this."""
    size = torch.tensor([len(data)], device=ranks.device)
    dist.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == 0:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


def gather_contents(own: Contents, ranks: Ranks) -> Contents:
    """Return the names, sizes and digests of the files that all ranks contribute to a bundle (stored folder). Each rank
    passes its own files. Collective: every rank must call this."""
    files: dict[str, BundledFile] = {}
    for data in gather_bytes(own.encode(), ranks):
        files |= Contents.model_validate_json(data).files
    return Contents.model_validate_json(broadcast_bytes(Contents(files=files).encode(), ranks))


def wait_for_ranks(ranks: Ranks) -> None:
    """Return when every rank has called this function. Collective: every rank must call this."""
    any_rank(False, ranks)


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Return whether `flag` is true on at least one rank. Collective: every rank must call this."""
    raised = torch.tensor([int(flag)], device=ranks.device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised)


def _open_rendezvous(rank: int, world_size: int, *, address: str, port: int) -> Store:
    """Return the torch store at `address` and `port` through which the ranks find each other. Rank 0 listens only on
    the given address, whereas torch would listen on all interfaces."""
    if rank:
        return TCPStore(address, port, world_size, is_master=False)
    listener = socket.create_server((address, port))
    return TCPStore(address, port, world_size, is_master=True, master_listen_fd=listener.detach())


def _find_loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _start_deepspeed() -> None:
    with hide_modules(*THREADED_MODULES):  # importing MLflow takes as long as the rest of DeepSpeed
        import deepspeed
        import deepspeed.ops

    logger = logging.getLogger("DeepSpeed")  # DeepSpeed logs to stdout by default; only errors matter
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.ERROR)
    # Only used for the shared-memory all-reduce, which would be compiled with g++ here. gloo works as well.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_init_required=False)
