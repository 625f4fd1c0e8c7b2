"""The transformers engine on small random models: the claims about every engine, and claims about this engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from tests.support.engines import *  # noqa: F403  # pytest collects the claims about every engine here
from tests.support.engines import (
    CONTINUATIONS,
    MIXED,
    POLICY,
    PROMPTS,
    SAMPLING,
    Loaded,
    Published,
    engine_of,
    load_if_needed,
    plain_logprobs,
    request,
    require_plain_logprobs,
)
from tests.support.policies import write_policy


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return partial(load_if_needed, HuggingFaceEngine(TransformersEngine()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path)
    return path


@pytest.fixture(scope="module")
def engine(directory) -> HuggingFaceEngine:
    return engine_of(directory)


@contextmanager
def embedded_rows() -> Iterator[list[int]]:
    """Yield a list that collects the number of rows of each forward pass while the block runs."""
    rows: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(len(inputs[0]))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield rows
    handle.remove()


@pytest.mark.parametrize("architecture", ["mistral", "gpt2"])
def test_log_probs_of_other_architectures_are_those_of_a_plain_forward_pass(architecture, tmp_path):
    write_policy(tmp_path, architecture)
    groups = engine_of(tmp_path).generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    assert len({len(completion.tokens) for group in groups for completion in group}) > 3
    require_plain_logprobs(Published(tmp_path, POLICY), MIXED, groups, 0.8)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "mixtral", "qwen3_moe", "gpt2"])
def test_likelihoods_of_other_architectures_in_several_batches_are_those_of_each_sequence(architecture, tmp_path):
    write_policy(tmp_path, architecture)
    engine, model = engine_of(tmp_path, max_batch_rows=7), Published(tmp_path, POLICY).model()
    for continuations in (CONTINUATIONS, [[7], [8]]):
        likelihoods = engine.score_continuations(PROMPTS, continuations)
        expected = [[sum(plain_logprobs(model, prompt, tokens, 1.0)) for tokens in continuations] for prompt in PROMPTS]
        np.testing.assert_allclose(likelihoods, expected, atol=1e-4)


def test_step_counts_include_every_sequence_of_each_decoding_step(directory):
    engine = engine_of(directory)
    groups = engine.generate(MIXED, SAMPLING)
    lengths = [len(completion.tokens) for group in groups for completion in group]
    sums = engine.step_sums()
    # The prefill generates the first token of each sequence, and a decoding step each other token.
    assert (sums.steps, sums.sequences) == (max(lengths) - 1, sum(lengths) - len(lengths))
    live = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert sums.sequences_squared == sum(count**2 for count in live)
    assert 0 < sums.seconds <= sums.sequence_seconds <= max(live) * sums.seconds


def test_the_same_work_gives_the_same_bits_after_any_other_work(directory, engine):
    engine.generate([request(99, 50)], SamplingConfig(max_new_tokens=5))
    assert engine.generate(MIXED, SAMPLING) == engine_of(directory).generate(MIXED, SAMPLING)


def test_a_group_that_is_split_into_batches_gives_the_same_tokens(directory, engine):
    small = engine_of(directory, max_batch_rows=3)
    with embedded_rows() as rows:
        groups = small.generate(MIXED, SAMPLING)
    assert max(rows) == 3
    for few, many in zip(groups, engine.generate(MIXED, SAMPLING), strict=True):
        assert [completion.tokens for completion in few] == [completion.tokens for completion in many]


def test_finished_rows_leave_the_batch(engine):
    work = [request(row, 10, group=8) for row in range(8)]
    with embedded_rows() as rows:
        completions = [completion for group in engine.generate(work, SAMPLING) for completion in group]
    longest = max(len(completion.tokens) for completion in completions)
    alive = [sum(len(completion.tokens) > step for completion in completions) for step in range(1, longest)]
    assert rows[0] == 8  # each prompt is prefilled once for all completions of its group
    assert len(rows) == longest
    assert all(left <= decoded <= left / 0.75 for left, decoded in zip(alive, rows[1:], strict=True))
    assert alive[-1] < 0.75 * 64


def test_progress_grows_with_every_step(directory):
    engine = engine_of(directory)
    before = engine.progress
    assert before > 0
    engine.generate([request(1, 5)], SamplingConfig(max_new_tokens=1))
    assert engine.progress == before + 1


class Trap:
    """Create a directory when this object is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_pickled_weights_are_never_opened(tmp_path):
    write_policy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(str(tmp_path / "sprung"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput):
        engine_of(tmp_path)
    assert not (tmp_path / "sprung").exists()
