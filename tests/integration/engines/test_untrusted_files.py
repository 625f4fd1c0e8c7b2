"""Batches with fewer rows than completions: when waiting rows are admitted, and that completions do not change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.protocol import Completion
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.engines import engine_of, request
from tests.support.policies import write_policy
from tests.support.rollout_workers import digest

WORK = [request(row, length, group=6) for row, length in enumerate([30, 3, 19, 3, 70])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path, eos_share=0.08)
    return path


def expected_steps(lengths: Sequence[int], places: int) -> list[int]:
    """Return the number of rows of each decoding step, given the final lengths of the completions."""
    batch, waiting, steps = list(lengths[:places]), list(lengths[places:]), []
    while True:
        batch = [left - 1 for left in batch]
        alive = [left for left in batch if left > 0]
        if not alive and not waiting:
            return steps
        if alive:
            steps.append(len(alive))
        if len(alive) < 0.75 * len(batch):
            admitted, waiting = waiting[: places - len(alive)], waiting[places - len(alive) :]
            batch = alive + admitted


def generate_with_steps(directory: Path, places: int) -> tuple[list[list[Completion]], list[int]]:
    """Return the completions of the work and the number of rows of each decoding step."""
    engine, steps = engine_of(directory, max_batch_rows=places), []
    count = engine._step
    engine._step = lambda sequences: (count(sequences), steps.append(sequences))[0]
    return engine.generate(WORK, SamplingConfig(max_new_tokens=40)), [rows for rows in steps if rows]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("places", [1, 4, 16, 29, 30])
def test_rows_are_admitted_when_a_quarter_of_the_batch_is_free(places, directory):
    groups, steps = generate_with_steps(directory, places)
    by_length = sorted(range(len(WORK)), key=lambda index: WORK[index].num_prompt_tokens)
    assert steps == expected_steps([len(one.tokens) for index in by_length for one in groups[index]], places)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "mistral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_admitted_row_gets_the_same_completion_as_alone(architecture, temperature, tmp_path):
    write_policy(tmp_path, architecture, eos_share=0.08 if temperature else 1e-6)
    few, alone = engine_of(tmp_path, max_batch_rows=4), engine_of(tmp_path)
    sampling = SamplingConfig(max_new_tokens=40, temperature=temperature)
    work = [replace(prompt, budget=budget) for prompt, budget in zip(WORK, [9, 40, 5, 17, 30], strict=True)]
    for prompt, group in zip(work, few.generate(work, sampling), strict=True):
        for sample in (0, 5):
            one = replace(prompt, inputs=prompt.inputs[:1], seeds=prompt.seeds[sample : sample + 1])
            [[expected]] = alone.generate([one], sampling)
            assert group[sample].tokens == expected.tokens
            assert group[sample].logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert group[sample].finish_reason is expected.finish_reason


@pytest.mark.thorough
def test_rows_that_outlast_many_admissions_do_not_widen_the_cache(tmp_path, monkeypatch):
    write_policy(tmp_path, eos_share=1e-6)
    monkeypatch.setattr("rheostat.models.engines.local.decoding.ROOM", 2)
    widths = []

    def note(module: torch.nn.Module, inputs: object, output: object) -> None:
        if type(module).__name__ == "LlamaModel":
            widths.append(output.past_key_values.get_seq_length())

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    # The first row is near its end when the last three begin. It leaves alone, and a single free row admits nobody.
    budgets = [30, 28, 28, 28, 30, 30, 30]
    work = [replace(request(row, 4, group=1), budget=budget) for row, budget in enumerate(budgets)]
    groups = engine_of(tmp_path, max_batch_rows=4).generate(work, SamplingConfig(max_new_tokens=30))
    handle.remove()
    assert max(widths) <= 4 + 30 + 2
    assert [len(group[0].tokens) for group in groups] == budgets
    alone = engine_of(tmp_path)
    for prompt, group in zip(work, groups, strict=True):
        [[expected]] = alone.generate([prompt], SamplingConfig(max_new_tokens=30))
        assert group[0].tokens == expected.tokens


@pytest.mark.thorough
def test_the_same_work_has_the_same_digest_with_any_number_of_workers(home, work):
    works = [replace(work, rows=rows) for rows in ((7, 2, 11, 3, 8), (0, 1, 4), (5, 6, 9, 10))]
    only, first, second = (RolloutWorker(str(home), "run", TransformersEngine(max_batch_rows=6), 1) for _ in range(3))
    by_one = [digest(only.generate(each)) for each in works]
    by_two = [
        digest(worker.generate(each)) for worker, each in zip((first, second, first), reversed(works), strict=True)
    ]
    assert by_two[::-1] == by_one
    assert len(set(by_one)) == 3
