"""Likelihoods by the transformers engine, in batches and of any architecture, and how it times its steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.store.bundles import BundleRef
from models.config.engines import SamplingConfig, TransformersEngine
from models.engines.protocol import build_engine
from models.records.model_input import ModelInput
from models.records.versions import ModelVersion
from tests.support.engines import CONTINUATIONS, PROMPTS
from tests.support.inputs import asking
from tests.support.policies import ARCHITECTURES, write_policy

POLICY = ModelVersion(version=0, weights=BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0))


def naive(directory: Path, given: ModelInput, continuation: list[int]) -> float:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([given.tokens.tolist() + continuation]), use_cache=False).logits[0].double()
    logprobs_LV = logits_TV[len(given) - 1 : -1].log_softmax(dim=-1)
    return float(logprobs_LV.gather(1, torch.tensor(continuation)[:, None]).sum())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("continuations", [CONTINUATIONS, [[7], [8]]])
def test_likelihoods_are_those_of_each_sequence_by_itself(architecture, continuations, tmp_path):
    write_policy(tmp_path, architecture)
    engine = build_engine(TransformersEngine(max_batch_rows=7))  # of several batches
    engine.load(tmp_path, POLICY)
    found = engine.likelihoods(PROMPTS, continuations)
    expected = [[naive(tmp_path, prompt, continuation) for continuation in continuations] for prompt in PROMPTS]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_steps_count_every_sequence_that_a_decoding_step_brought_forward(tmp_path):
    write_policy(tmp_path)
    engine = build_engine(TransformersEngine())
    engine.load(tmp_path, POLICY)
    requests = [asking(row, given.tokens.tolist(), (row, row + 9)) for row, given in enumerate(PROMPTS)]
    groups = engine.generate(requests, SamplingConfig(max_new_tokens=16))
    lengths = [len(completion.tokens) for group in groups for completion in group]
    sums = engine.steps()
    # The prefill writes each sequence's first token; every later one takes a step.
    assert (sums.steps, sums.sequences) == (max(lengths) - 1, sum(lengths) - len(lengths))
    live = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert sums.sequences_squared == sum(count**2 for count in live)
    assert 0 < sums.seconds <= sums.sequence_seconds <= max(live) * sums.seconds
