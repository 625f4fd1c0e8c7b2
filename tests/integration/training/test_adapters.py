"""Adapters: the trained, published, merged and served weights equal base plus alpha / rank x B A."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef, fetch_bundle, publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Completion
from rheostat.models.modeling.adapters import add_adapters, load_trainable, save_adapters
from rheostat.models.modeling.critic import load_critic, write_critic
from rheostat.models.modeling.directory import check_directory, copy_directory, write_merged
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.merging import load_merged, merge, read_adapter
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.training.frozen import load_frozen_policy
from rheostat.models.training.versions import LoadedModels
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.critics import critic_work, start_critic
from tests.support.engines import MIXED, POLICY
from tests.support.policies import write_adapter, write_policy
from tests.support.processes import preload
from tests.support.training import publish_scratch
from tests.support.update_workers import (
    CONFIG,
    DORA,
    LORA,
    change,
    fetch_part,
    load_trained,
    start_worker,
    update_once,
    update_work,
)

preload(__name__)

ADAPTED = change(CONFIG, lora=LORA, learning_rate=1e-2)
BASE = BundleRef(key="policies/base", digest="base", bytes=0)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """Base and adapter whose deltas are as large as the weights."""
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    write_policy(base, request.param)
    write_adapter(base, adapter, LORA, ref=BASE)
    return base, adapter


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> tuple[str, ModelVersion, Outcome]:
    """Run with its first policy and an update of that policy with adapters."""
    uri = str(tmp_path_factory.mktemp("adapted"))
    policy = publish_scratch(f"{uri}/run", Path(uri, "scratch"))
    return uri, policy, update_once(uri, policy, ADAPTED)


# ---- merging


def by_hand(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the sum of base and adapter, computed from their files by the documented expression."""
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for name, a_RI in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            delta_OI = settings["lora_alpha"] / settings["r"] * (tensors[f"{layer}.lora_B.weight"] @ a_RI)
            weight = layer.removeprefix("base_model.model.") + ".weight"
            weights[weight] = weights[weight] + (delta_OI.T if settings["fan_in_fan_out"] else delta_OI)
    return weights


def test_the_merged_model_equals_base_plus_delta_bit_for_bit(pair):
    expected, merged = by_hand(*pair), load_merged(*pair).state_dict()
    assert expected.keys() <= merged.keys()
    for name, weight in expected.items():
        assert torch.equal(merged[name], weight), name
    plain = load_policy(pair[0]).state_dict()
    assert sum(not torch.equal(merged[name], plain[name]) for name in plain) in (21, 12)  # of llamas' and of gpt2's


def test_peft_loads_the_adapter_and_merges_it_to_the_same_weights(pair):
    base, adapter = pair
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    theirs = loaded.merge_and_unload().state_dict()
    for name, weight in load_merged(base, adapter).state_dict().items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)


# ---- serving


def generate_completions(
    directory: Path, *, adapter: Path | None = None, dtype: str = "float32"
) -> list[list[Completion]]:
    engine = HuggingFaceEngine(TransformersEngine(dtype=dtype))
    engine.load(directory, POLICY, adapter=adapter)
    return engine.generate(MIXED, SamplingConfig(max_new_tokens=12))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_an_adapter_gives_the_same_bits_as_with_the_merged_model(pair, dtype, tmp_path):
    base, adapter = pair
    write_merged(base, adapter, tmp_path, dtype=torch.float32)
    served = generate_completions(base, adapter=adapter, dtype=dtype)
    assert served == generate_completions(tmp_path, dtype=dtype)
    assert served != generate_completions(base, dtype=dtype)


def test_a_rollout_worker_serves_the_version_that_the_digest_of_base_and_adapter_names(adapted):
    uri, policy, outcome = adapted
    worker = RolloutWorker(uri, "run", TransformersEngine(), threads=1)
    assert [worker.take(version) for version in (policy, outcome.model)] == [policy.digest, outcome.model.digest]
    assert outcome.model.digest not in (policy.digest, outcome.model.adapter.digest)


def test_the_merged_directory_and_the_adapter_next_to_its_base_are_policies(adapted, tmp_path):
    uri, _, outcome = adapted
    adapter, merged = fetch_part(uri, outcome, "adapter"), tmp_path / "merged"
    merged.mkdir()
    copy_directory(adapter, merged)
    assert check_directory(merged)[2] == check_directory(adapter)[2] == load_policy(merged).num_parameters()
    assert (merged / "tokenizer.json").read_bytes() == (Path(uri, "scratch") / "tokenizer.json").read_bytes()
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    with pytest.raises(BadInput, match=r"moved: .*base_model_name_or_path.* '../../pol"):
        check_directory(moved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "sets use_dora = True, but 0 of .* layers have magnitudes"),
        ({"bias": "all"}, "sets bias = 'all', but only LoRA, rsLoRA and DoRA"),
        ({"peft_type": "IA3"}, "sets peft_type"),
        ({"r": 0}, "adapter_config.json .*greater than or equal to 1"),
    ],
)
def test_an_adapter_of_another_method_is_refused(pair, changes, message, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(pair[1], adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(BadInput, match=message):
        load_merged(pair[0], adapter)


def test_an_adapter_of_another_model_is_refused(pair, tmp_path):
    write_policy(tmp_path, "mistral", changes={"intermediate_size": 100})
    with pytest.raises(BadInput, match=r"is for weights of shape \(64, 192\), .* \(64, 100\)|no linear layer"):
        load_merged(tmp_path, pair[1])


# ---- training


def test_new_adapters_change_neither_the_output_nor_the_callers_random_state(pair):
    base, _ = pair
    tokens_BT = torch.arange(3, 40)[None]
    plain, adapted = load_policy(base), load_policy(base)
    before = torch.get_rng_state()
    add_adapters(adapted, LORA, base=BASE)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(adapted(tokens_BT).logits, plain(tokens_BT).logits)


def test_new_adapters_depend_on_the_base_alone(pair, tmp_path):
    base, _ = pair
    found = []
    for name, ref in [("one", BASE), ("two", BASE), ("three", change(BASE, digest="other"))]:
        model, directory = load_policy(base), tmp_path / name
        torch.manual_seed(len(name))
        add_adapters(model, LORA, base=ref)
        directory.mkdir()
        save_adapters(model, directory)
        found.append((directory / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("targets", "layers"), [(("q_proj", "v_proj"), 6), (("layers.0.mlp.up_proj",), 1), ("all-linear", 21)]
)
def test_adapter_targets_match_the_ends_of_module_names_as_in_peft(targets, layers, tmp_path):
    write_policy(tmp_path / "base")
    model = load_policy(tmp_path / "base")
    add_adapters(model, change(LORA, targets=targets), base=BASE)
    save_adapters(model, tmp_path)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 2 * layers
    theirs = PeftModel.from_pretrained(load_policy(tmp_path / "base"), tmp_path)
    assert sum(".lora_A." in name for name, _ in theirs.named_parameters()) == layers


def test_an_update_trains_an_adapter_and_never_the_base(uri, policy):
    worker, store = start_worker(uri, ADAPTED), open_store(f"{uri}/run")
    first = worker.update(update_work(uri, policy))
    second = worker.update(update_work(uri, first.model, reference=policy))
    assert first.metrics["kl"] < second.metrics["kl"]
    assert policy.weights == first.model.weights == second.model.weights
    assert len({policy.digest, first.model.digest, second.model.digest}) == 3
    names = {path.name for path in fetch_bundle(store, second.model.adapter).iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "bundle.json"}
    held = next(iter(worker._models.policy._trainer._model.state_dict().items()))  # what stands in memory after steps
    assert torch.equal(held[1], load_policy(fetch_bundle(store, policy.weights)).state_dict()[held[0]])


def trained(uri, policy, config):
    """Return a worker after its first update, and the version whose adapter is no longer zero."""
    worker = start_worker(uri, config)
    return worker, worker.update(update_work(uri, policy)).model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_without_its_adapters_computes_the_bits_of_a_second_base(uri, policy, dtype):
    worker, version = trained(uri, policy, change(ADAPTED, dtype=dtype))
    directory = fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    base = load_frozen_policy(directory, change(CONFIG, dtype=dtype), temperature=0.9, ranks=worker._models.ranks)
    batch = lay_out(
        [
            ModelInput.from_prompt([5, 6, 7]).append_completion([8, 9]),
            ModelInput.from_prompt([5, 6, 7]).append_completion([10]),
        ]
    )
    found = worker._models.reference(policy, policy=version)(batch)
    assert torch.equal(found, base.forward(batch))
    adapted = worker._models.policy.trainer.forward(batch)
    assert adapted.requires_grad and not torch.equal(found, adapted)


def test_a_second_base_is_in_memory_only_if_the_reference_is_another_policy(uri, policy):
    def held() -> int:
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if isinstance(each, torch.nn.Parameter))

    size, before = load_policy(fetch_bundle(open_store(f"{uri}/run"), policy.weights)).num_parameters(), held()
    worker, version = trained(uri, policy, ADAPTED)
    assert size < held() - before < 1.5 * size  # one base and the adapters
    other = publish_scratch(f"{uri}/run", Path(uri, "other"), seed=1)
    worker.update(update_work(uri, version, reference=other))
    assert 2 * size < held() - before < 2.5 * size


def test_an_update_ends_at_the_same_bits_as_with_a_second_base(uri, policy, monkeypatch):
    second = update_work(uri, trained(uri, policy, ADAPTED)[1], reference=policy)
    shared = start_worker(uri, ADAPTED).update(second)
    monkeypatch.setattr(LoadedModels, "is_base", lambda *_: False)
    assert start_worker(uri, ADAPTED).update(second) == replace(shared, timings=ANY)


def test_the_optimizer_state_is_of_the_adapters_alone(adapted):
    uri, _, outcome = adapted
    moments = load_file(fetch_part(uri, outcome, "state") / "rank-00000.safetensors")
    size = sum(tensor.numel() for name, tensor in moments.items() if name.startswith("exp_avg."))
    assert size == sum(tensor.numel() for tensor in load_trained(uri, outcome.model).values())


def test_the_merged_weights_have_the_outputs_of_the_trainer(adapted):
    """The trainer adds the delta's output to the base's output, an engine adds the delta to the weights.

    Both differ by float32 rounding.
    """
    uri, _, outcome = adapted
    store, tokens_BT = open_store(f"{uri}/run"), torch.arange(3, 60)[None]
    trained = load_trainable(store, outcome.model, load=load_policy, lora=LORA)
    served = load_merged(fetch_part(uri, outcome, "weights"), fetch_part(uri, outcome, "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(trained(tokens_BT).logits, served(tokens_BT).logits, rtol=1e-5, atol=1e-5)


# ---- critics


@pytest.mark.parametrize("lora", [LORA, DORA])
def test_a_critics_head_is_trained_in_full_next_to_adapters_and_both_are_merged_as_peft_does(
    uri, policy, lora, tmp_path
):
    store = open_store(f"{uri}/run")
    (tmp_path / "made").mkdir()
    write_critic(None, fetch_bundle(store, policy.weights), tmp_path / "made")
    critic = ModelVersion(version=0, weights=publish_bundle(store, tmp_path / "made", prefix="critics"))
    learnt = start_critic(uri, change(ADAPTED, lora=lora)).update(critic_work(uri, policy, critic)).critic
    adapter = fetch_bundle(store, learnt.adapter)
    assert load_file(adapter / "adapter_model.safetensors")["base_model.model.score.weight"].any()
    merged = load_critic(fetch_bundle(store, critic.weights))
    merge(merged, read_adapter(adapter))
    trained = load_trainable(store, learnt, load=load_critic, lora=lora)
    theirs = PeftModel.from_pretrained(load_critic(fetch_bundle(store, critic.weights)), adapter)
    tokens_BT = torch.arange(3, 60)[None]
    with torch.no_grad():
        values = merged(tokens_BT).logits
        torch.testing.assert_close(values, trained(tokens_BT).logits, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(values, theirs(tokens_BT).logits, rtol=1e-4, atol=1e-6)
    assert values.any()
