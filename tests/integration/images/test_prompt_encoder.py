"""Text encoders run on the device of their worker, and use its memory only while they encode prompts."""

import pytest
import torch

from rheostat.models.denoising.frozen_parts import PromptEncoder, keep_on_device
from rheostat.models.denoising.pipeline import load_text_encoders, read_pipeline
from tests.support.pipelines import PROMPTS
from tests.support.processes import preload

preload(__name__)

META = torch.device("meta")
"""Device without data, which stands for a GPU: an operation on tensors of two devices fails."""


@pytest.fixture(scope="module")
def encoder(directory):
    return PromptEncoder(directory, tokens=16, device="cpu")


def test_encoders_compute_on_the_device_to_which_they_are_copied(directory, family):
    model = read_pipeline(directory)
    pipe = load_text_encoders(model)
    encoders = [getattr(pipe, name) for name in model.parts if name.startswith("text_encoder")]
    own = [weight.data_ptr() for each in encoders for weight in each.parameters()]
    with torch.no_grad(), keep_on_device(encoders, META):
        assert {weight.device for each in encoders for weight in (*each.parameters(), *each.buffers())} == {META}
        if family != "qwen":  # it reads the lengths of prompts from its mask, which has no values here
            condition = model.family.encode(pipe, PROMPTS[0], 16, META)
            assert {each.device for each in condition.values()} == {META}
    assert [weight.data_ptr() for each in encoders for weight in each.parameters()] == own


def test_a_prompt_has_the_same_conditioning_alone_and_next_to_others(directory, encoder):
    together = encoder.encode(PROMPTS)
    for prompt, condition in zip(PROMPTS, together, strict=True):
        [alone] = PromptEncoder(directory, tokens=16, device="cpu").encode([prompt])
        for name, values in condition.items():
            assert torch.equal(values, alone[name]), name


@pytest.mark.gpu
def test_encoders_on_a_gpu_agree_with_the_cpu_and_release_their_memory(directory, encoder):
    on_gpu = PromptEncoder(directory, tokens=16, device="cuda")
    on_gpu.encode([""])  # cuBLAS allocates its workspace
    before = torch.cuda.memory_allocated()
    visits = []
    on_gpu._encoders[0].register_forward_hook(lambda *_: visits.append(torch.cuda.memory_allocated() > before))
    on_gpu.announce(PROMPTS)
    [first] = on_gpu.encode(PROMPTS[:1])
    assert visits and all(visits)
    assert torch.cuda.memory_allocated() == before
    count = len(visits)
    condition = on_gpu.select(PROMPTS, range(len(PROMPTS)))
    assert len(visits) == count  # the announced prompts were encoded with the first one
    assert {each.device.type for each in condition.values()} == {"cuda"}
    assert {each.device.type for each in first.values()} == {"cpu"}
    expected = encoder.select(PROMPTS, range(len(PROMPTS)))
    for name, values in condition.items():
        torch.testing.assert_close(values.cpu(), expected[name], rtol=1e-3, atol=1e-4)
