"""Merges of the files of policies by SLERP, TIES and DARE."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rheostat.flows.cli.app import main
from rheostat.infra.config import encode_recorded
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef, fetch_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.merging import (
    DareLinearMerge,
    DareTiesMerge,
    LinearMerge,
    MergeMethod,
    SlerpMerge,
    TiesMerge,
)
from rheostat.models.config.policy import MergeParent, MergePolicy
from rheostat.models.inspection.directory import inspect_policy
from rheostat.models.modeling.merge_methods import TensorVersions, merge_tensor
from rheostat.models.modeling.merging import load_merged
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.weighted_sum import policy_digest, write_merge
from rheostat.models.records.merges import MergeWork, MethodWithBase, Parent
from tests.support.policies import make_policy, write_adapter, write_policy

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Path]:
    """A base model and two other random policies of the same shape."""
    folder = tmp_path_factory.mktemp("policies")
    for seed in range(3):
        write_policy(folder / str(seed), seed=seed)
    return [folder / str(seed) for seed in range(3)]


def write(target: Path, method: MergeMethod, parents: list[Path], base: Path, weights=(0.5, 0.5), **options) -> dict:
    """Merge the files of policies, and read the merged tensors."""
    target.mkdir()
    with_base = MethodWithBase(method, Parent("base", base, 1.0) if method.base_path else None)
    ways = tuple(Parent(str(path), path, weight) for path, weight in zip(parents, weights, strict=True))
    write_merge(MergeWork(ways, target, method=with_base, **options))
    return {name: tensor for path in target.glob("*.safetensors") for name, tensor in load_file(path).items()}


def merge_loaded(method: MergeMethod, base: dict, *parents: dict, weights=(0.5, 0.5)) -> dict[str, Tensor]:
    return {
        name: merge_tensor(
            method,
            TensorVersions(name, [each[name] for each in parents], weights, base[name] if method.base_path else None),
            dtype=torch.float32,
        )
        for name in base
    }


def all_methods(base: Path) -> list[MergeMethod]:
    return [SlerpMerge(), TiesMerge(base=base), DareLinearMerge(base=base, seed=3), DareTiesMerge(base=base, seed=3)]


def test_merged_files_do_not_depend_on_how_the_policies_are_divided_into_files(tmp_path, policies):
    base, one, other = policies
    load_policy(one).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    for path in one.glob("tokenizer*"):
        (tmp_path / "sharded" / path.name).write_bytes(path.read_bytes())
    loaded = [load_file(path / WEIGHTS) for path in policies]
    for method in all_methods(base):
        expected = merge_loaded(method, *loaded)
        for name, first in (("whole", one), ("sharded", tmp_path / "sharded")):
            found = write(tmp_path / f"{method.kind}-{name}", method, [first, other], base)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[each], expected[each]) for each in found), (method.kind, name)
        assert not torch.equal(expected["lm_head.weight"], loaded[0]["lm_head.weight"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_are_merged_as_the_policies_that_they_describe(tmp_path, kind):
    base = tmp_path / "base"
    write_policy(base, kind)
    adapters = []
    for place, lora in enumerate((LoraConfig(rank=2, alpha=5), LoraConfig(rank=3, alpha=4))):
        adapters.append(tmp_path / str(place))
        ref = BundleRef(key="base", digest=f"{place}", bytes=0)
        write_adapter(base, adapters[-1], lora, ref=ref, seed=place)
        path = adapters[-1] / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    method = TiesMerge(base=base, density=0.3)
    found = write(tmp_path / "merged", method, adapters, base)
    stored = load_file(base / WEIGHTS)
    alone = [dict(load_merged(base, path).named_parameters()) for path in adapters]
    names = [name for name in found if name in alone[0]]
    expected = merge_loaded(
        method,
        {name: stored[name] for name in names},
        *({name: each[name].detach() for name in names} for each in alone),
    )
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-6)
    assert any(not torch.equal(found[name], stored[name]) for name in names)
    with pytest.raises(BadInput, match=r"the method 'ties' has no low rank. Use adapters = 'full'"):
        write(tmp_path / "ranks", method, adapters, base, adapters="ranks")


def test_a_base_model_with_other_shapes_is_refused(tmp_path, policies):
    base, one, other = policies
    write_policy(tmp_path / "wide", changes={"intermediate_size": 208})
    with pytest.raises(BadInput, match=r"base differs from .*down_proj.weight: shape: expected \(64, 192\)"):
        write(tmp_path / "sum", TiesMerge(base=base), [one, other], tmp_path / "wide")


def test_a_base_model_may_be_written_by_another_version_of_transformers(tmp_path, policies):
    base, one, other = policies
    older = tmp_path / "older"
    write_policy(older)
    config = json.loads((older / "config.json").read_text())
    rope = config.pop("rope_parameters")
    (older / "config.json").write_text(json.dumps(config | {"rope_theta": rope["rope_theta"]}))
    half = {name: value.bfloat16() for name, value in load_file(base / WEIGHTS).items()}
    save_file(half | {"spare.weight": torch.zeros(2).bfloat16()}, older / WEIGHTS, {"format": "pt"})
    found = write(tmp_path / "sum", TiesMerge(base=base), [one, other], older)
    loaded = [load_file(path / WEIGHTS) for path in (one, other)]
    expected = merge_loaded(TiesMerge(base=base), half, *loaded)
    assert found.keys() == loaded[0].keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_base_model_must_be_the_initial_policy_of_the_runs(tmp_path, policies):
    base, one, other = policies
    method = MethodWithBase(TiesMerge(base=base), Parent("base", base, 1.0, "d" * 64))
    for start, message in ((policy_digest(base), ""), (policy_digest(other), "Name the initial policy as the base")):
        parents = tuple(Parent(str(path), path, 0.5, start) for path in (one, other))
        target = tmp_path / start[:8]
        target.mkdir()
        if not message:
            write_merge(MergeWork(parents, target, method=method))
            continue
        with pytest.raises(BadInput, match=message):
            write_merge(MergeWork(parents, target, method=method))
        write_merge(MergeWork(parents, target, method=method, unrelated=True))


def test_a_run_starts_from_the_merge_of_its_configuration(tmp_path, policies):
    base, one, other = policies
    method = TiesMerge(base=base, density=0.4)
    parents = tuple(MergeParent(path=path, weight=0.5) for path in (one, other))
    policy = MergePolicy(parents=parents, method=method)
    assert inspect_policy(policy, ()).shape.context == 256
    outcome = make_policy(tmp_path, policy)
    assert outcome.model is not None
    bundle = fetch_bundle(open_store(f"{tmp_path}/run"), outcome.model.weights)
    write(tmp_path / "merged", method, [one, other], base)
    assert (bundle / WEIGHTS).read_bytes() == (tmp_path / "merged" / WEIGHTS).read_bytes()
    assert encode_recorded(policy.model_dump(mode="json"), policy)["method"]["density"] == 0.4
    plain = MergePolicy(parents=parents)
    assert "method" not in encode_recorded(plain.model_dump(mode="json"), plain)


@pytest.mark.system
def test_the_command_merges_by_a_method_and_records_it(tmp_path, policies, capsys):
    base, one, other = policies
    words = ["merge", f"{one}=0.5", f"{other}=0.5", "--method", "ties", "--base", str(base), "--density", "0.4"]
    assert main([*words, "--to", str(tmp_path / "merged")]) == 0
    printed = capsys.readouterr().out
    assert "policy, the merge (kind ties, density 0.4, scale 1.0) of" in printed
    assert f"+1 × {base}  {policy_digest(base)[:16]}  (base of the differences)" in printed
    expected = merge_loaded(TiesMerge(base=base, density=0.4), *(load_file(path / WEIGHTS) for path in policies))
    found = load_file(tmp_path / "merged" / WEIGHTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    recorded = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert recorded["method"] == {"kind": "ties", "density": 0.4, "scale": 1.0}
    assert recorded["base"]["digest"] == policy_digest(base)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "The merge (`ties`) of these policies" in card and "- `density` = `0.4`" in card
    assert f"- base model …/{base.name}: `{policy_digest(base)}`" in card


def test_merge_json_of_a_weighted_sum_has_no_method(tmp_path, policies):
    write(tmp_path / "sum", LinearMerge(), policies[:2], policies[2])
    assert json.loads((tmp_path / "sum" / "merge.json").read_text()).keys() == {
        "parents", "adapters", "who", "when", "version", "soup",
    }  # fmt: skip
