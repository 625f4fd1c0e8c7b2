"""The benchmark against TRL's DDPOTrainer gives both trainers the same workload and compares them per round."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import __main__ as bench
from bench.ddpo import WORKLOAD, find_trl, steps_table, table
from bench.ddpo_workload import EpochCost, read_workload
from rheostat.infra.errors import BadInput

OURS = EpochCost(drawing_cpu=3.0, drawing=4.0, training_cpu=5.0, training=6.0, loading_cpu=0.5, peak_bytes=2**21)
TRL = EpochCost(drawing_cpu=6.0, drawing=2.0, training_cpu=10.0, training=9.0, loading_cpu=0.0, peak_bytes=2**20)


def test_a_workload_that_was_written_is_read_unchanged(tmp_path):
    workload = replace(WORKLOAD, pipeline=tmp_path / "pipeline", trail=tmp_path / "trail.npz", learnt=3)
    workload.write(tmp_path / "workload.json")
    assert read_workload(tmp_path / "workload.json") == workload


def test_micro_batches_and_optimizer_steps_divide_the_pictures_of_an_epoch_evenly():
    """TRL counts pictures and we count states; a remainder would give one trainer less work."""
    per_step = WORKLOAD.pictures // WORKLOAD.minibatches
    assert WORKLOAD.pictures % WORKLOAD.together == per_step % WORKLOAD.states == 0
    assert WORKLOAD.states % WORKLOAD.steps == WORKLOAD.states % 3 == 0, "our micro-batches have whole pictures"


def test_the_table_compares_the_trainers_per_round():
    slower = replace(TRL, drawing_cpu=9.0)
    rows = {row[0]: row[1:] for row in table(WORKLOAD, [OURS, OURS, OURS], [TRL, slower, TRL], weights=7).rows}
    assert rows["generation, CPU seconds"] == (3.0, 6.0, 2.0, 2.0, 3.0)
    assert rows["epoch, CPU seconds"] == (8.0, 16.0, 2.0, 2.0, 19 / 8)
    assert rows["training, seconds"] == (6.0, 9.0, 1.5, 1.5, 1.5)
    assert rows["peak memory, MiB"] == (2.0, 1.0, 0.5, 0.5, 0.5)


def test_log_probs_that_differ_by_more_than_rounding_stop_the_benchmark():
    logprobs_NT = torch.zeros(2, 3)
    assert steps_table(logprobs_NT, logprobs_NT + 9e-6).rows[0][1] == 6
    for error in (2e-5, float("nan")):
        with pytest.raises(BadInput, match=r"TRL.*1e-05"):
            steps_table(logprobs_NT, logprobs_NT + error)


def test_a_missing_trl_environment_is_named_with_the_command_that_creates_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BENCH_DDPO_PYTHON", str(tmp_path / "python"))
    assert bench.main(["--only", "ddpo"]) == 2
    assert "make bench-ddpo" in capsys.readouterr().err
    monkeypatch.setenv("BENCH_DDPO_PYTHON", __file__)
    assert find_trl() == Path(__file__)
