"""Adapters: what is trained, published, merged and served is base plus alpha / rank x B A, and nothing else."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infra.bundles import BundleRef, fetch_bundle
from infra.errors import BadInput
from infra.storage import open_store
from models.config import SamplingConfig, TransformersEngine
from models.engines.transformers import HuggingFaceEngine
from models.objectives.config import LoraConfig
from models.records import PolicyVersion
from models.roles.adapters import put_adapters, save_adapters
from models.roles.merging import load_merged
from models.roles.policy import load_policy
from models.work import UpdateWork
from tests.policies import write_policy
from tests.test_engine import MIXED, POLICY
from tests.test_update_worker import CONFIG, files, gradients, same_after_restart, start, together, work
from tests.training import publish_scratch

LORA = LoraConfig(rank=4, alpha=10)
ADAPTED = CONFIG.model_copy(update={"lora": LORA, "learning_rate": 1e-2})
BASE = BundleRef(key="policies/base", digest="base", bytes=0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def policy(uri: str) -> PolicyVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "scratch"))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """A base and an adapter whose deltas are as large as the weights."""
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    write_policy(base, request.param)
    model = load_policy(base)
    put_adapters(model, LORA, base=BASE)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(index))
    save_adapters(model, adapter)
    return base, adapter


# ---- merging


def by_hand(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Base and adapter from their files alone, added by the documented expression."""
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for name, a_RI in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            delta_OI = settings["lora_alpha"] / settings["r"] * (tensors[f"{layer}.lora_B.weight"] @ a_RI)
            weight = layer.removeprefix("base_model.model.") + ".weight"
            weights[weight] = weights[weight] + (delta_OI.T if settings["fan_in_fan_out"] else delta_OI)
    return weights


def test_the_merged_model_is_base_and_delta_to_the_bit(pair):
    expected, merged = by_hand(*pair), load_merged(load_policy, *pair).state_dict()
    assert expected.keys() <= merged.keys()
    for name, weight in expected.items():
        assert torch.equal(merged[name], weight), name
    plain = load_policy(pair[0]).state_dict()
    assert sum(not torch.equal(merged[name], plain[name]) for name in plain) in (21, 12)  # of llamas' and of gpt2's


def test_peft_loads_the_adapter_and_merges_it_to_the_same_weights(pair):
    base, adapter = pair
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    theirs = loaded.merge_and_unload().state_dict()
    for name, weight in load_merged(load_policy, base, adapter).state_dict().items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)


# ---- training


def test_fresh_adapters_change_nothing_and_draw_nothing_from_the_callers_random_numbers(pair):
    base, _ = pair
    tokens_BT = torch.arange(3, 40)[None]
    plain, adapted = load_policy(base), load_policy(base)
    before = torch.get_rng_state()
    put_adapters(adapted, LORA, base=BASE)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(adapted(tokens_BT).logits, plain(tokens_BT).logits)


def test_an_update_trains_an_adapter_and_never_the_base(uri, policy):
    first = start(uri, ADAPTED).update(work(uri, policy)).policy
    second = start(uri, ADAPTED).update(work(uri, first, reference=policy)).policy
    assert policy.weights == first.weights == second.weights
    assert len({policy.digest, first.digest, second.digest}) == 3
    store = open_store(f"{uri}/run")
    assert {path.name for path in fetch_bundle(store, second.adapter).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "bundle.json",
    }


def test_an_adapters_update_is_the_same_bits_hot_reloaded_and_repeated(uri, policy):
    hot = start(uri, ADAPTED)
    first = hot.update(work(uri, policy)).policy
    again = work(uri, first, reference=policy)
    outcome = hot.update(again)
    assert hot.update(again).policy == outcome.policy
    cold = start(uri, ADAPTED).update(again)
    assert (cold.policy, cold.metrics) == (outcome.policy, outcome.metrics)
