"""Memory that an update rank needs, besides its model, to train on one long row, with and without sequence parallelism.

Separate processes, one per rank, take two steps: a short one, because libraries load some of their parts late, and a
measured one.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.tables import Table
from rheostat.infra.processes.heap import heap_variables
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import build_scratch
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.tokenizer import train_tokenizer
from rheostat.models.training.ranks import join_ranks
from rheostat.models.training.trainer import Trainer

TOKENS = 4096
SHAPE = ScratchPolicy(hidden_size=256, intermediate_size=1024, layers=8, heads=8, kv_heads=4, context=TOKENS)
SLICES = (1, 2, 4)


def measure() -> Iterator[Table]:
    """Measure the peak memory and seconds of a training step on one long row, with 1, 2 and 4 sequence-parallel ranks.

    Yields a table of the maxima over ranks, with the memory that Rheostat predicts. Memory is counted above the memory
    before the step.
    """
    outline = DecoderSizes.from_scratch(SHAPE, vocab_size=SHAPE.vocab_size).outline()
    rows = []
    for slices in SLICES:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        commands = [[sys.executable, "-m", __name__, *map(str, (rank, slices, port))] for rank in range(slices)]
        environment = os.environ | heap_variables()  # as in workers
        started = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=environment) for each in commands]
        outputs = [each.communicate()[0].split()[-2:] for each in started]
        update = UpdateConfig(sequence_parallel=slices)
        sizes = MicrobatchSizes.compute(update, longest=TOKENS, completions=4, ranks=slices)
        foretold = microbatch_bytes(update, outline, sizes, held=float("inf"))
        total = foretold["update_activations_bytes"] + foretold["update_head_bytes"]
        peak, seconds = (max(float(each[column]) for each in outputs) for column in (0, 1))
        rows.append((slices, f"{peak / 1e6:,.0f}", f"{total / 1e6:,.0f}", f"{seconds:.1f}"))
    yield Table(
        title=f"One row of {TOKENS:,} tokens, {outline.parameters / 1e6:.1f} million parameters in float32",
        columns=("ranks of a row", "MB of a pass, each rank", "MB foretold", "seconds of a step"),
        rows=tuple(rows),
    )


def resident(name: str) -> int:
    """Return a memory size of this process in bytes. `name` is a field of /proc/self/status, such as VmRSS."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def main(rank: int, ranks: int, port: int) -> None:
    """Run two training steps as one rank of a sequence-parallel group.

    Print the second step's memory in bytes and its seconds. `port` is the port on which the ranks connect.
    """
    torch.set_num_threads(1)
    update = UpdateConfig(sequence_parallel=ranks, activation_checkpointing=False)
    joined = join_ranks(rank, ranks, address="127.0.0.1", port=port, sequence_parallel=ranks)
    tokenizer = train_tokenizer(["0123456789 + - ="], vocab_size=SHAPE.vocab_size, context=TOKENS)
    trainer = Trainer(TokenLogprobs(build_scratch(SHAPE, tokenizer, seed=0), temperature=1.0), update, ranks=joined)
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS - 16)
    for length in (16, TOKENS - 16):
        batch = lay_out([ModelInput.from_prompt(range(16)).append_completion(tokens[:length])])
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        began = time.perf_counter()
        trainer.backward(-trainer.forward(batch).mean(), last=True)
        peak = resident("VmHWM") - before
        trainer.step(1e-6)
        seconds = time.perf_counter() - began
    sys.stdout.write(f"{peak} {seconds}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
