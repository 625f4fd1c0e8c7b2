"""The transformers engine on a GPU: the tests of every engine, and the precision of bfloat16."""

from functools import partial

import numpy as np
import pytest
import torch

from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.device import choose_device
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from tests.support.engines import *  # noqa: F403  # pytest collects the tests of every engine here
from tests.support.engines import MIXED, Loaded, load_if_needed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return partial(load_if_needed, HuggingFaceEngine(TransformersEngine()))


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_the_trainer_computes_the_log_probs_that_the_engine_recorded(dtype, largest, policy, record_property):
    record_property("part", f"own engine and trainer, {dtype}")
    engine = HuggingFaceEngine(TransformersEngine(dtype=dtype))
    engine.load(policy.directory, policy.version)
    groups = engine.generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    engine.close()
    pairs = [
        (given.append_completion(completion.tokens), completion.logprobs)
        for asked, group in zip(MIXED, groups, strict=True)
        for given, completion in zip(asked.inputs, group, strict=True)
    ]
    module = TokenLogprobs(load_policy(policy.directory, dtype=getattr(torch, dtype)), temperature=0.8)
    device = torch.device(choose_device())
    module.to(device).eval()
    with torch.inference_mode():
        inputs = module.prepare_inputs(lay_out([row for row, _ in pairs]), device)
        found_N = module(inputs).float().cpu().numpy()
    errors_N = np.abs(found_N - np.concatenate([logprobs for _, logprobs in pairs]))
    record_property("figure", f"log-probs differ by {errors_N.mean():.1e} on average, {errors_N.max():.1e} at most")
    assert errors_N.max() < largest


def test_convolutions_of_float32_are_not_rounded_to_tf32(record_property):
    record_property("part", "float32 convolutions")
    assert choose_device() == "cuda"
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 448, 448, generator=generator)
    patches = torch.nn.Conv2d(3, 1024, kernel_size=14, stride=14, bias=False)
    with torch.inference_mode():
        exact = torch.nn.functional.conv2d(images.double(), patches.weight.double(), stride=14)
        found = patches.cuda()(images.cuda()).cpu()
    error = float((found - exact).norm() / exact.norm())
    record_property("figure", f"relative error {error:.1e}")
    assert error < 1e-5  # TF32 has 3e-4
