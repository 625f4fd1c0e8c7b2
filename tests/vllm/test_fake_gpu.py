"""Updates use no tensor on the CPU and do not wait for the GPU, shown with PyTorch's build for CUDA without a GPU.

The tests are in this folder because vLLM's environment for CUDA contains that build.
"""

import sys

import pytest

from tests.support.cuda_build import fake_gpu_variables, require_cuda_build, run_json
from tests.support.fake_updates import CHECKS, FAULTY, SOUND

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Error of every check, or None."""
    with pytest.MonkeyPatch.context() as patch:
        variables = fake_gpu_variables(require_cuda_build(patch), tmp_path_factory.mktemp("gpu"))
    return run_json([sys.executable, "-m", "tests.support.fake_gpu"], [*CHECKS], variables, seconds=1500)


@pytest.mark.parametrize("check", SOUND)
def test_an_update_uses_only_the_gpu(errors, check):
    assert errors[check] is None


@pytest.mark.parametrize("check", FAULTY)
def test_a_tensor_on_the_cpu_or_a_number_that_is_read_from_the_gpu_is_an_error(errors, check):
    expected = "DataDependentOutputException" if "read" in check else "FakeTensorDeviceMismatchError"
    assert errors[check].startswith(expected)
