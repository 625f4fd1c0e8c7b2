"""`vllm.LLM.generate` with a timer, in vLLM's own environment: `python -m bench.vllm_raw WORKLOAD`.

For every line on stdin it generates the whole workload once, and writes the time as a line of JSON to stdout. It needs
vLLM and no package of Rheostat's.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RawWorkload:
    """Settings of vLLM's `LLM` class, and the prompts, lengths and seeds of the completions that it generates."""

    model: Path
    dtype: str
    max_num_seqs: int
    cache_bytes: int
    prompts: tuple[tuple[int, ...], ...]
    """Prompts as token IDs, one per completion. The prompt of a group is repeated for each completion."""
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RawRound:
    """Seconds and number of generated tokens of one run of the workload with `LLM.generate`."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RawProcess:
    """Running process with vLLM's `LLM` loaded, and a function that generates the workload in the process."""

    pid: int
    run_round: Callable[[str], RawRound]
    """Function that generates the workload once.

    The argument is `same` for the seeds and log-probs of Rheostat, or `plain` for generation without seeds and log-
    probs.
    """


RAY_NICENESS = 15
"""Niceness of vLLM's process.

It equals the niceness that Ray gives to workers and therefore to Rheostat's server, so that both have the same
priority.
"""


@contextmanager
def start_raw(python: Path, workload: RawWorkload, path: Path, *, threads: int) -> Iterator[RawProcess]:
    """Start a process with vLLM's `LLM`, and stop it after the block. Yields the process.

    `python` is the interpreter of vLLM's environment, and the workload is written to `path`.
    """
    path.write_text(json.dumps(asdict(workload), default=str))
    command = ["nice", "-n", str(RAY_NICENESS), str(python), "-m", "bench.vllm_raw", str(path)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdin is not None and child.stdout is not None

    def ask(how: str) -> RawRound:
        child.stdin.write(f"{how}\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if not answer:
            raise RuntimeError(f"raw vLLM failed with exit code {child.wait()}; see its output above")
        return RawRound(**json.loads(answer))

    try:
        yield RawProcess(child.pid, ask)
    finally:
        child.stdin.close()  # then it and its engine's process end
        child.wait()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's processes print, but stdout must contain only answers
    _serve(json.loads(Path(sys.argv[1]).read_text()), answers)


def _serve(record, answers) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=record["model"],
        dtype=record["dtype"],
        max_num_seqs=record["max_num_seqs"],
        kv_cache_memory_bytes=record["cache_bytes"],
        enable_prefix_caching=True,
        enforce_eager=True,
        enable_chunked_prefill=False,  # like Rheostat's server on a CPU, where chunked prefill breaks seeds
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in record["prompts"]]
    for line in sys.stdin:
        same = line.strip() == "same"
        requests = [
            SamplingParams(
                max_tokens=length,
                seed=seed if same else None,
                logprobs=0 if same else None,
                flat_logprobs=same,
                ignore_eos=True,
                detokenize=False,
            )
            for length, seed in zip(record["lengths"], record["seeds"], strict=True)
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, requests, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
