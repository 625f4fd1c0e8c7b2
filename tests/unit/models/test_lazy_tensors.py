"""Tensors that are computed when they are written: the files are those of plain tensors, and few are kept at a time."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rheostat.models.modeling.lazy_tensors import GATHERED, LazyTensor, build_lazy_state, compute_values
from rheostat.models.modeling.safetensors import save_pretrained
from tests.support.model_families import FAMILIES, build_config

CONVERTED = ["llama", "gemma3_text", "qwen3_moe", "mixtral", "llama4_text", "gpt_oss"]
"""Families with tied weights, and families whose files hold experts in other tensors than the model."""


def build(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(build_config(family)).float()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in CONVERTED else pytest.mark.models)
        for family, keys in FAMILIES.items()
        if "refused" not in keys
    ],
)
def test_a_model_is_saved_from_lazy_tensors_as_from_plain_tensors(family, tmp_path):
    model, gathered = build(family), []

    def gather(parameter, writer):
        gathered.append(parameter)
        return parameter.detach().clone()

    plain = save_pretrained(model, tmp_path / "plain")
    lazy = save_pretrained(model, tmp_path / "lazy", state=build_lazy_state(model, gather))
    assert lazy == plain
    assert {path.name: path.read_bytes() for path in (tmp_path / "lazy").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()
    }
    assert len(gathered) == len([*model.parameters()])  # none was gathered twice


def test_functions_of_lazy_tensors_are_computed_on_the_values_and_only_when_asked():
    computed = []

    def lazy(values):
        return LazyTensor(torch.empty_like(values, device="meta"), lambda writer: computed.append(1) or values)

    one, other = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    first, second = torch.cat([lazy(one), lazy(other)]).T.contiguous().chunk(2, dim=1)
    assert (first.shape, first.device.type, computed) == ((3, 2), "meta", [])
    assert torch.equal(compute_values(first), one.T)
    assert torch.equal(compute_values(second), other.T)
    assert torch.equal(compute_values(one), one)


def test_only_the_latest_parameters_are_kept():
    model, gathered = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(GATHERED + 1))), []
    state = build_lazy_state(model, lambda parameter, writer: gathered.append(parameter) or parameter.detach())
    for name in [*state, *state]:
        compute_values(state[name])
    assert len(gathered) == 2 * (GATHERED + 1)
