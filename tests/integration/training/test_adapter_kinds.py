"""rsLoRA and DoRA adapters: forward passes, merged weights and training steps equal those of the library peft."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef, fetch_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.adapters import add_adapters, load_trainable, outline, save_adapters
from rheostat.models.modeling.directory import check_directory, write_merged
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.merging import load_merged, read_adapter
from rheostat.models.modeling.parameter_storage import cast_parameters
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.weighted_sum import write_merge
from rheostat.models.records.merges import MergeWork, Parent
from rheostat.models.records.model_input import ModelInput
from rheostat.models.training.ranks import join_ranks
from rheostat.models.training.trainer import Trainer
from tests.support.policies import write_adapter, write_policy
from tests.support.processes import preload
from tests.support.servers import reserved_port
from tests.support.update_workers import CONFIG, change, distance, fetch_part, start_worker, update_work

preload(__name__)

BASE = BundleRef(key="policies/base", digest="base", bytes=0)
KINDS = {
    "rsLoRA": LoraConfig(rank=4, alpha=10, rank_stabilized=True),
    "DoRA": LoraConfig(rank=4, alpha=10, dora=True),
    "both": LoraConfig(rank=4, alpha=10, rank_stabilized=True, dora=True),
}
TOKENS_BT = torch.arange(3, 40)[None]
MAGNITUDE = ".lora_magnitude_vector"


@pytest.fixture(scope="module", params=KINDS)
def lora(request) -> LoraConfig:
    """Settings of one kind of adapter."""
    return KINDS[request.param]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def base(request, tmp_path_factory) -> Path:
    """Directory of a base model; gpt2 stores its weights as inputs x outputs."""
    directory = tmp_path_factory.mktemp("base")
    write_policy(directory, request.param)
    return directory


def scale_magnitudes(adapter: Path) -> None:
    """Multiply the stored magnitudes of an adapter by numbers between 0.5 and 1.5."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(MAGNITUDE):
            tensors[name] = tensor * (0.5 + torch.rand(tensor.shape, generator=generator))
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def adapter(base, lora, tmp_path_factory) -> Path:
    """Adapter whose factors change the weights by as much as their size, and whose magnitudes are not the norms."""
    directory = tmp_path_factory.mktemp("adapter")
    write_adapter(base, directory, lora, ref=BASE)
    scale_magnitudes(directory)
    return directory


# ---- merging


def by_hand(base: Path, adapter: Path, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Return the merged weights in float64, computed from the files by the formulas of the papers."""
    weights = {name: weight.double() for name, weight in load_file(base / "model.safetensors").items()}
    tensors = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    scale = 10 / 2 if lora.rank_stabilized else 10 / 4  # alpha = 10, rank = 4
    is_transposed = json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"]
    for name, a_RI in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        key = layer.removeprefix("base_model.model.") + ".weight"
        weight_OI = weights[key].T if is_transposed else weights[key]
        weight_OI = weight_OI + scale * (tensors[f"{layer}.lora_B.weight"] @ a_RI)
        if lora.dora:
            norm_O = weight_OI.square().sum(1).sqrt()
            weight_OI = torch.diag(tensors[f"{layer}{MAGNITUDE}"] / norm_O) @ weight_OI
        weights[key] = weight_OI.T if is_transposed else weight_OI
    return weights


def test_merged_weights_follow_the_formulas_of_the_papers(base, adapter, lora):
    merged = load_merged(base, adapter).state_dict()
    plain = load_file(base / "model.safetensors")
    for name, expected in by_hand(base, adapter, lora).items():
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert sum(not torch.equal(merged[name], plain[name]) for name in plain) in (21, 12)  # of llamas' and of gpt2's


def test_peft_loads_the_adapter_with_the_same_outputs_and_merges_it_to_the_same_weights(base, adapter):
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        expected, merged = theirs(TOKENS_BT).logits, load_merged(base, adapter)
        torch.testing.assert_close(merged(TOKENS_BT).logits, expected, rtol=1e-5, atol=1e-5)
    weights = theirs.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-6)


def test_the_model_under_training_has_the_outputs_of_peft(base, adapter, lora, tmp_path):
    model = load_policy(base)
    add_adapters(model, lora, base=BASE)
    parameters = dict(model.named_parameters())
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        place = name.removeprefix("base_model.model.").removesuffix(".weight") + ".default.weight"
        parameters[place].data.copy_(tensor)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS_BT).logits, theirs(TOKENS_BT).logits, rtol=1e-6, atol=1e-6)
    theirs.save_pretrained(tmp_path)
    ours, saved = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)


def test_an_exported_directory_contains_the_merged_weights(base, adapter, tmp_path):
    write_merged(base, adapter, tmp_path, dtype=torch.float32)
    assert check_directory(tmp_path)[2] == load_policy(base).num_parameters()
    exported = load_policy(tmp_path).state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in load_merged(base, adapter).state_dict().items())


# ---- weighted sums


def with_base(adapter: Path, base: Path, target: Path) -> Parent:
    """Return a copy of an adapter as a parent of a merge."""
    target.mkdir()
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    (target / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    return Parent(str(target), target, 1.0)


def test_a_weighted_sum_adds_merged_weights_and_joins_the_ranks_of_rslora_but_not_of_dora(
    base, adapter, lora, tmp_path
):
    parent = with_base(adapter, base, tmp_path / "adapter")
    halves = tuple(Parent(parent.name, parent.path, 0.5) for _ in range(2))
    (tmp_path / "sum").mkdir()
    write_merge(MergeWork(halves, tmp_path / "sum"))
    expected = load_merged(base, adapter).state_dict()
    for name, weight in load_file(tmp_path / "sum" / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name
    (tmp_path / "ranks").mkdir()
    if lora.dora:
        with pytest.raises(BadInput, match=r"is a DoRA adapter, .* no low rank. Use adapters = 'full'"):
            write_merge(MergeWork(halves, tmp_path / "ranks", adapters="ranks"))
        return
    write_merge(MergeWork(halves, tmp_path / "ranks", adapters="ranks"))
    for name, weight in load_merged(base, tmp_path / "ranks").state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=2e-6)


# ---- files that do not fit


def drop_magnitude(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith(MAGNITUDE))]


def shorten_magnitude(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith(MAGNITUDE))
    tensors[name] = tensors[name][:3].clone()


@pytest.mark.parametrize(
    ("change_tensors", "message"),
    [
        (drop_magnitude, "use_dora = True, but 20 of 21 layers have magnitudes"),
        (shorten_magnitude, r"have the shape \(3,\), but the layer has \d+ outputs"),
    ],
)
def test_an_adapter_with_wrong_magnitudes_is_refused(change_tensors, message, tmp_path):
    write_policy(tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter", KINDS["DoRA"], ref=BASE)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    change_tensors(tensors)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(BadInput, match=message):
        load_merged(tmp_path / "base", tmp_path / "adapter")


def test_dora_refuses_a_layer_with_an_output_whose_weights_are_zero(tmp_path):
    write_policy(tmp_path)
    model = load_policy(tmp_path)
    model.model.layers[1].mlp.up_proj.weight.data[[2, 5]] = 0
    with pytest.raises(BadInput, match=r"layer model.layers.1.mlp.up_proj, because the weights of 2 of its outputs"):
        add_adapters(model, KINDS["DoRA"], base=BASE)


# ---- training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_leave_the_outputs_unchanged(base, lora, dtype):
    plain = load_policy(base, dtype=getattr(torch, dtype))
    adapted = copy.deepcopy(plain)
    add_adapters(adapted, lora, base=BASE)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert sum(parameter.numel() for parameter in trained) == lora.count_trained(outline(plain))
    cast_parameters(adapted, plain.dtype)  # as the trainer does
    assert torch.equal(adapted(TOKENS_BT).logits, plain(TOKENS_BT).logits)


STEPS = UpdateConfig(learning_rate=1e-2, max_grad_norm=1.0, weight_decay=0.1)


def train_ours(base: Path, lora: LoraConfig, target: Path, inputs: list[ModelInput], *, steps: int) -> list[float]:
    """Train an adapter with Rheostat's trainer, save it in `target` and return the loss of each step."""
    model, losses = load_policy(base), []
    add_adapters(model, lora, base=BASE)
    save_adapters(model, target / "first")
    with reserved_port() as port:
        ranks = join_ranks(0, 1, address="127.0.0.1", port=port)
    trainer = Trainer(TokenLogprobs(model, temperature=1.0), STEPS, ranks=ranks)
    for _ in range(steps):
        loss = -trainer.forward(lay_out(inputs)).mean()
        trainer.backward(loss, last=True)
        trainer.step(STEPS.learning_rate)
        losses.append(float(loss.detach()))
    trainer.save_weights(target / "last")
    return losses


def train_with_peft(base: Path, first: Path, target: Path, inputs: list[ModelInput], *, steps: int) -> list[float]:
    """Train an adapter of peft in a plain loop, save it in `target` and return the loss of each step."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), first, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=STEPS.learning_rate, betas=(STEPS.beta1, STEPS.beta2), weight_decay=STEPS.weight_decay
    )
    losses = []
    for _ in range(steps):
        logprobs = []
        for each in inputs:
            prompt, completion = (list(chunk.tokens) for chunk in each.chunks)
            tokens_T = torch.tensor(prompt + completion)
            logprobs_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
            places_C = torch.arange(len(prompt), len(tokens_T))
            logprobs.append(logprobs_TV[places_C - 1, tokens_T[places_C]])
        loss = -torch.cat(logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, STEPS.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(target)
    return losses


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_training_steps_equal_those_of_a_plain_loop_with_peft(architecture, lora, tmp_path):
    write_policy(tmp_path / "base", architecture)
    inputs = [
        ModelInput.from_prompt([5, 6, 7, 8]).append_completion([9, 10, 11]),
        ModelInput.from_prompt([12, 13]).append_completion([14, 15, 16, 17]),
    ]
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
    ours = train_ours(tmp_path / "base", lora, tmp_path, inputs, steps=3)
    theirs = train_with_peft(tmp_path / "base", tmp_path / "first", tmp_path / "peft", inputs, steps=3)
    assert ours == pytest.approx(theirs, rel=1e-5)
    first, last, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "last", "peft")
    )
    assert distance(last, expected) < 1e-3 * distance(first, expected)
    if lora.dora:
        moved = {name: tensor for name, tensor in last.items() if name.endswith(MAGNITUDE)}
        assert all(not torch.equal(tensor, first[name]) for name, tensor in moved.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_publishes_an_adapter_whose_merged_weights_have_the_outputs_of_the_trainer(uri, policy, lora, dtype):
    worker, store = (
        start_worker(uri, change(CONFIG, lora=lora, learning_rate=1e-2, dtype=dtype)),
        open_store(f"{uri}/run"),
    )
    first = worker.update(update_work(uri, policy))
    second = worker.update(update_work(uri, first.model, reference=policy))
    assert policy.weights == second.model.weights and first.metrics["kl"] < second.metrics["kl"]
    trained = load_trainable(store, second.model, load=load_policy, lora=lora)
    adapter = fetch_part(uri, second, "adapter")
    served = load_merged(fetch_bundle(store, policy.weights), adapter)
    assert read_adapter(adapter).has_magnitudes is lora.dora
    with torch.no_grad():
        torch.testing.assert_close(trained(TOKENS_BT).logits, served(TOKENS_BT).logits, rtol=1e-5, atol=1e-5)
