"""Weighted sums of policies: exact arithmetic, and refusals of sums without a meaning."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rheostat.flows.cli.app import main
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef, fetch_bundle, publish_bundle
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run
from rheostat.infra.store.storage import open_store
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.policy import MergeParent, MergePolicy
from rheostat.models.inspection.directory import inspect_policy
from rheostat.models.modeling.merging import load_merged
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.safetensors import TensorOutline, streamed_pieces
from rheostat.models.modeling.weighted_sum import policy_digest, weighted_sum, write_merge
from rheostat.models.records.merges import Adapters, MergeWork, Parent, start_of
from tests.support.policies import make_policy, small_tokenizer, write_adapter, write_policy

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> list[Path]:
    """Three random policies of one shape."""
    folder = tmp_path_factory.mktemp("parents")
    for seed in range(3):
        write_policy(folder / str(seed), seed=seed)
    return [folder / str(seed) for seed in range(3)]


def merge_policies(target: Path, weighed: dict[Path, float], *, dtype=None, adapters: Adapters = "full") -> dict:
    """Write a weighted sum and read its tensors."""
    target.mkdir()
    ways = tuple(Parent(str(path), path, weight) for path, weight in weighed.items())
    write_merge(MergeWork(ways, target, dtype=dtype, adapters=adapters))
    return load_file(target / WEIGHTS) if (target / WEIGHTS).exists() else {}


def refuse_merge(weighed: dict[Path, float], target: Path, **options) -> str:
    with pytest.raises(BadInput) as found:
        merge_policies(target, weighed, **options)
    assert "\n" not in str(found.value)
    target.rmdir()
    return str(found.value)


def copy_with_settings(path: Path, copy: Path, **settings) -> Path:
    """Copy a policy with another configuration."""
    shutil.copytree(path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | settings))
    return copy


# ---- arithmetic


def test_a_sum_is_accumulated_in_float32_in_order_and_cast_once():
    third = torch.tensor([1.0, 2.0, -3.0]).bfloat16()
    tensors = [third, third + 1, third * 3]
    expected = ((0 + tensors[0].float() * 0.5) + tensors[1].float() * 1.25) + tensors[2].float() * -0.75
    found = weighted_sum(tensors, (0.5, 1.25, -0.75), dtype=torch.bfloat16)
    assert torch.equal(found, expected.bfloat16())
    # By hand: 1·0.5 + 2·1.25 − 3·0.75 = 0.75; 2·0.5 + 3·1.25 − 6·0.75 = 0.25; −3·0.5 − 2·1.25 + 9·0.75 = 2.75
    assert found.tolist() == [0.75, 0.25, 2.75]
    # 256 + 1 is 256 in bfloat16: whoever sums in the tensors' own precision loses it each time.
    small, large = torch.ones(1).bfloat16(), torch.full((1,), 256.0).bfloat16()
    assert weighted_sum([large, small, small], (1.0, 1.0, 1.0), dtype=torch.bfloat16).item() == 258
    # 1·0.3 + 256·0.7 = 179.5; with products in bfloat16 it would be 179.3.
    assert weighted_sum([small, large], (0.3, 0.7), dtype=torch.float32).item() == pytest.approx(179.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_that_all_parents_share_keeps_its_bits(dtype):
    value = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    assert torch.equal(weighted_sum([value, value.clone()], (0.3, 0.7), dtype=dtype), value)


def test_integer_tensors_must_be_the_same_in_all_parents():
    with pytest.raises(ValueError, match=r"torch\.int64 .* they differ"):
        weighted_sum([torch.tensor([1]), torch.tensor([2])], (0.5, 0.5), dtype=torch.int64)


def test_a_merged_policy_is_the_weighted_sum_of_its_parents(tmp_path, parents):
    weights = (1.75, -0.5, -0.25)
    found = merge_policies(tmp_path / "sum", dict(zip(parents, weights, strict=True)))
    loaded = [load_file(path / WEIGHTS) for path in parents]
    assert found.keys() == loaded[0].keys()
    for name, tensor in found.items():
        exact = sum(weight * each[name].double() for weight, each in zip(weights, loaded, strict=True))
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=2e-6)
        assert not torch.equal(tensor, loaded[0][name]) or torch.equal(loaded[0][name], loaded[1][name])


def test_identical_parents_give_the_parent_bit_for_bit(tmp_path, parents):
    copy = copy_with_settings(parents[0], tmp_path / "copy")
    merge_policies(tmp_path / "sum", {parents[0]: 0.3, copy: 0.7})
    assert (tmp_path / "sum" / WEIGHTS).read_bytes() == (parents[0] / WEIGHTS).read_bytes()


def test_a_merge_of_a_merge_is_the_merge_with_multiplied_weights(tmp_path, parents):
    """Balanced initialization: θ_1 = a·instruct + (1−a)·distilled, θ_0 = b·θ_1 + (1−b)·pretrained."""
    instruct, distilled, pretrained = parents
    merge_policies(tmp_path / "first", {instruct: 0.4, distilled: 0.6})
    twice = merge_policies(tmp_path / "second", {tmp_path / "first": 0.75, pretrained: 0.25})
    once = merge_policies(tmp_path / "once", {instruct: 0.3, distilled: 0.45, pretrained: 0.25})
    for name, tensor in once.items():
        torch.testing.assert_close(twice[name], tensor, rtol=0, atol=1e-6)


def test_a_sum_of_sharded_parents_is_sharded_as_the_first_and_cast_once(tmp_path, parents):
    load_policy(parents[1]).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    for path in parents[1].glob("tokenizer*"):
        (tmp_path / "sharded" / path.name).write_bytes(path.read_bytes())
    target = tmp_path / "sum"
    merge_policies(target, {tmp_path / "sharded": 0.5, parents[0]: 0.5}, dtype="bfloat16")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = {path.name for path in target.glob("*.safetensors")}
    assert len(files) > 1 and set(index["weight_map"].values()) == files
    found = {name: tensor for file in files for name, tensor in load_file(target / file).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    one, other = (load_file(path / WEIGHTS) for path in parents[:2])
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[name], (other[name] * 0.5 + one[name] * 0.5).bfloat16())
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.bfloat16


def test_transformers_loads_a_sum_and_merge_json_lists_the_parents(tmp_path, parents):
    found = merge_policies(tmp_path / "sum", {parents[0]: 0.25, parents[1]: 0.75})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sum")
    assert torch.equal(model.state_dict()["model.norm.weight"], found["model.norm.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sum")
    assert model(**tokenizer("1+1=", return_tensors="pt")).logits.isfinite().all()
    told = json.loads((tmp_path / "sum" / "merge.json").read_text())["parents"]
    assert [(parent["weight"], parent["digest"]) for parent in told] == [
        (0.25, policy_digest(parents[0])),
        (0.75, policy_digest(parents[1])),
    ]


# ---- refusals


def test_parents_are_refused_by_the_first_difference(tmp_path, parents):
    one, other = parents[:2]
    target = tmp_path / "target"
    write_policy(tmp_path / "wide", changes={"intermediate_size": 208})
    write_policy(tmp_path / "deep", changes={"num_hidden_layers": 4})
    copy_with_settings(other, tmp_path / "rope", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    words = copy_with_settings(other, tmp_path / "words") / "tokenizer.json"
    words.write_text(words.read_text() + " ")
    half, tensors = copy_with_settings(other, tmp_path / "half", dtype="bfloat16"), load_file(other / WEIGHTS)
    save_file({name: value.bfloat16() for name, value in tensors.items()}, half / WEIGHTS, {"format": "pt"})
    for name, difference in [
        ("wide", "down_proj.weight: shape: expected (64, 192), found (64, 208)"),
        ("deep", "tensor model.layers.3.input_layernorm.weight: expected none, found one"),
        ("rope", "config.json: rope_parameters: expected {'rope_theta': 10000.0"),
        ("words", "tokenizer.json: expected the same"),
        ("half", "dtype: expected torch.float32, found torch.bfloat16"),
    ]:
        assert difference in refuse_merge({one: 0.5, tmp_path / name: 0.5}, target)
    assert merge_policies(target, {one: 0.5, half: 0.5}, dtype="bfloat16")["model.norm.weight"].dtype == torch.bfloat16


def write_trained_run(store: Path, name: str, start: Path, policy: Path) -> Path:
    """Write a run that started from a policy and trained another, and return the directory of the trained policy."""
    run = create_run(str(store), name, {})
    with run.lock():
        for number, source in enumerate((start, policy)):
            bundle = publish_bundle(run.store, source, prefix="policies")
            key = "it-0001/update" if number else "policy/initial"
            made = run.commit(Manifest(key=key, bundles={"weights": bundle}, detail={"version": number}))
    return fetch_bundle(open_run(str(store), name).store, made.bundles["weights"])


def test_policies_with_different_starting_policies_are_refused_unless_unrelated_is_set(tmp_path, parents):
    start, one, other = parents
    paths = [
        write_trained_run(tmp_path, "one", start, one),
        write_trained_run(tmp_path, "same", start, other),
        write_trained_run(tmp_path, "other", other, one),
    ]
    starts = [start_of(path) for path in paths]
    assert starts[0] == starts[1] == policy_digest(start) and starts[2] == policy_digest(other)

    def policy(*indices: int, unrelated: bool = False) -> MergePolicy:
        ways = tuple(MergeParent(path=paths[index], weight=1 / len(indices)) for index in indices)
        return MergePolicy(parents=ways, allow_unrelated=unrelated)

    assert inspect_policy(policy(0, 1), ()).shape.context == 256
    with pytest.raises(BadInput, match=r"was trained from .*unrelated = true"):
        inspect_policy(policy(0, 2), ())
    assert inspect_policy(policy(0, 2, unrelated=True), ()).shape.context == 256


def test_a_run_may_start_from_a_sum(tmp_path, parents):
    ways = tuple(MergeParent(path=path, weight=weight) for path, weight in zip(parents, (2.0, -0.5, -0.5), strict=True))
    outcome = make_policy(tmp_path, MergePolicy(parents=ways))
    assert outcome.model is not None
    bundle = fetch_bundle(open_store(f"{tmp_path}/run"), outcome.model.weights)
    expected = merge_policies(tmp_path / "sum", dict(zip(parents, (2.0, -0.5, -0.5), strict=True)))
    assert (bundle / WEIGHTS).read_bytes() == (tmp_path / "sum" / WEIGHTS).read_bytes() and expected


# ---- adapters


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def adapted(request, tmp_path_factory) -> tuple[Path, list[Path]]:
    """A base, and two adapters of it with other ranks and layers."""
    folder = tmp_path_factory.mktemp("adapted")
    write_policy(folder / "base", request.param)
    loras = [LoraConfig(rank=2, alpha=5), LoraConfig(rank=3, alpha=4)]
    for index, lora in enumerate(loras):
        ref = BundleRef(key="base", digest=f"{index}", bytes=0)
        write_adapter(folder / "base", folder / str(index), lora, ref=ref, seed=index)
        path = folder / str(index) / "adapter_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps(settings | {"base_model_name_or_path": "../base"}))
    return folder / "base", [folder / "0", folder / "1"]


@pytest.mark.thorough_after(1)
def test_adapters_are_summed_exactly_as_weights_and_as_ranks(tmp_path, adapted):
    base, adapters = adapted
    weighed = dict(zip(adapters, (1.5, -0.5), strict=True))
    full = merge_policies(tmp_path / "full", weighed)
    alone = [dict(load_merged(base, path).named_parameters()) for path in adapters]
    for name, tensor in full.items():
        expected = alone[0][name].double() * 1.5 - alone[1][name].double() * 0.5
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=2e-6)
    merge_policies(tmp_path / "ranks", weighed, adapters="ranks")
    joined = dict(load_merged(base, tmp_path / "ranks").named_parameters())
    for name, tensor in full.items():
        torch.testing.assert_close(joined[name].detach(), tensor, rtol=0, atol=2e-6)
    assert json.loads((tmp_path / "ranks" / "adapter_config.json").read_text())["r"] == 5


def test_peft_loads_joined_ranks_as_the_same_policy(tmp_path, adapted):
    from peft import PeftModel

    base, adapters = adapted
    merge_policies(tmp_path / "ranks", dict(zip(adapters, (0.25, 0.75), strict=True)), adapters="ranks")
    tokens = torch.tensor([[5, 6, 7, 8]])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ranks")
    ours = load_merged(base, tmp_path / "ranks")
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, rtol=0, atol=1e-4)


def test_adapters_are_joined_by_rank_only_if_all_parents_are_adapters(tmp_path, adapted, parents):
    base, adapters = adapted
    said = refuse_merge({adapters[0]: 0.5, base: 0.5}, tmp_path / "target", adapters="ranks")
    assert "adapters = 'ranks' joins the ranks of adapters" in said


# ---- the command


@pytest.mark.smoke
@pytest.mark.system
def test_the_command_writes_a_directory_with_a_card(tmp_path, parents, capsys):
    store = tmp_path / "store"
    write_trained_run(store, "demo", parents[2], parents[0])
    target = tmp_path / "merged"
    assert main(["merge", "demo@0=0.75", f"{parents[1]}=0.25", "--to", str(target), "--store", str(store)]) == 0
    assert "+0.75 × demo@0" in capsys.readouterr().out
    card = (target / "README.md").read_text()
    assert f"- 0.75 × demo@0: `{policy_digest(parents[2])}`" in card and "tags:\n- rheostat\n- merge" in card
    told = json.loads((target / "merge.json").read_text())
    assert told["who"] and told["when"] and told["version"]
    with safe_open(target / WEIGHTS, framework="pt") as found, safe_open(parents[2] / WEIGHTS, framework="pt") as first:
        assert found.metadata() == first.metadata()


def test_a_mergekit_file_describes_the_same_sum(tmp_path, adapted, parents):
    base, adapters = adapted
    file, words = tmp_path / "sum.yaml", [f"{parents[0]}=1.75", f"{adapters[0]}=-0.75"]
    assert main(["merge", *words, "--write-mergekit", str(file)]) == 0
    assert yaml.safe_load(file.read_text()) == {
        "merge_method": "linear",
        "models": [
            {"model": str(parents[0].resolve()), "parameters": {"weight": 1.75}},
            {"model": f"{base.resolve()}+{adapters[0].resolve()}", "parameters": {"weight": -0.75}},
        ],
        "parameters": {"normalize": False},
        "dtype": "float32",
    }
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert all(any(method in line for line in comments) for method in ("ties", "dare_ties", "slerp"))


# ---- memory


@pytest.mark.slow
def test_summing_parents_of_two_gigabytes_needs_memory_for_one_tensor_of_each(tmp_path):
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16, vocab_size=354,
        tie_word_embeddings=True, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    outlines = {name: TensorOutline(torch.float32, tuple(value.shape)) for name, value in model.named_parameters()}
    largest = max(torch.Size(outline.shape).numel() * 4 for outline in outlines.values())
    for number in range(2):
        directory = tmp_path / str(number)
        small_tokenizer().save_pretrained(directory)
        config.save_pretrained(directory)
        pieces = streamed_pieces(
            outlines,
            lambda name, value=number: torch.full(outlines[name].shape, float(value)),
            metadata={"format": "pt"},
        )
        with (directory / WEIGHTS).open("wb") as file:
            file.writelines(pieces)
        assert (directory / WEIGHTS).stat().st_size > 2e9
    code = """
import resource, sys
from pathlib import Path
from rheostat.models.modeling.weighted_sum import compare_parents, write_merge
from rheostat.models.records.merges import MergeWork, Parent
ways = tuple(Parent(path, Path(path), weight) for path, weight in zip(sys.argv[1:3], (1.75, -0.75)))
compare_parents(ways, unrelated=False, casts=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_merge(MergeWork(ways, Path(sys.argv[3])))
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""
    (tmp_path / "sum").mkdir()
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in ("0", "1", "sum"))]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken < 4.5 * largest, f"{taken / largest:.1f} tensors"  # two parents, their sum and a product
    with safe_open(tmp_path / "sum" / WEIGHTS, framework="pt") as opened:
        assert opened.get_tensor("model.layers.7.mlp.up_proj.weight").unique().tolist() == [-0.75]
