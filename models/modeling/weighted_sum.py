"""Merging of the files of policies. Tensors are merged one at a time, so no model is ever loaded completely.

By default, a merge is the weighted sum θ = Σ λ_i θ_i (model soups, arXiv 2203.05482) in float32, in the order of the
parents (the policies to merge), then cast once. A tensor that is equal in all parents, and in the base model of the
merge, stays unchanged, bit for bit. A LoRA or DoRA adapter is first added to its base. Its factors are never averaged
separately, because (Σ λ_i B_i)(Σ λ_i A_i) would contain products of one adapter's B with another's A.
Shapes: R rank, I inputs and O outputs.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import CONTENTS, BundledFile, Contents
from rheostat.infra.store.file_writer import describe_pieces, write_hashed
from rheostat.infra.store.inputs import fetch_path, format_path, recorded_base
from rheostat.models.config.merging import LinearMerge
from rheostat.models.config.policy import MergePolicy
from rheostat.models.modeling.directory import (
    INDEX,
    KEPT,
    check_directory,
    copy_config_files,
    meta_policy,
    weight_files,
)
from rheostat.models.modeling.merge_methods import TensorVersions, merge_tensor
from rheostat.models.modeling.merging import (
    SETTINGS,
    TENSORS,
    Adapter,
    add_adapter,
    find_base,
    is_adapter,
    read_adapter,
)
from rheostat.models.modeling.safetensors import DTYPES, TensorOutline, save_tensors, streamed_pieces
from rheostat.models.records.merges import (
    MERGE,
    WEIGHTED_SUM,
    Merge,
    MergedParent,
    MergeWork,
    MethodWithBase,
    Parent,
    start_of,
)

MEANING: Final = (
    *("model_type", "tie_word_embeddings", "hidden_act", "hidden_activation", "activation_function"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "head_dim", "rms_norm_eps", "layer_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "partial_rotary_factor"),
)
"""Settings in config.json that determine which function the weights compute, apart from their shapes. They must be
equal in all models whose weights are summed."""
_ONE_SCALE: Final[Mapping[str, object]] = {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
"""Values of peft's adapter settings with which all layers have the same rank and scale."""
CHUNK_BYTES: Final = 2**20
"""Number of bytes that are read at a time to compute the digest of a file."""


def find_parents(policy: MergePolicy) -> tuple[Parent, ...]:
    """Return the policies that are merged, each with its directory on this machine, its weight and the initial policy
    of its run."""
    return tuple(
        Parent(format_path(parent.path), fetch_path(parent.path), parent.weight, start_of(parent.path))
        for parent in policy.parents
    )


def find_method(policy: MergePolicy) -> MethodWithBase:
    """Return the method by which the policies are merged, with the directory of its base model on this machine."""
    path = policy.method.base_path
    base = None if path is None else Parent(format_path(path), fetch_path(path), 1.0, start_of(path))
    return MethodWithBase(policy.method, base)


# ---- checks of the parents
@dataclass(frozen=True, slots=True)
class Outline:
    """Names, dtypes and shapes of a policy's tensors, without their values."""

    directory: Path
    """Directory that contains the weights. For an adapter, the directory of its base model."""
    files: Mapping[str, tuple[Path, TensorOutline]]
    """File that contains each tensor, and the tensor's dtype and shape, by tensor name."""

    @staticmethod
    def read(directory: Path) -> "Outline":
        """Read the outline of a policy from the headers of its weight files."""
        weights = find_base(directory) if is_adapter(directory) else directory
        return Outline(weights, dict(_iter_files(weights)))

    def find_differences(
        self, expected: "Outline", *, casts: bool, is_base: bool = False
    ) -> Iterator[tuple[str, object, object]]:
        """Yield the differences between this outline and `expected`, as (tensor name, found value, expected value).
        With `casts`, differences in dtype are ignored.

        With `is_base`, this is the outline of a base model, which may have been written by another version of
        transformers than the trained models: settings that only one of the two has, tensors that only the base model
        has, such as a tied head, and dtypes are ignored."""
        for key in MEANING:
            actual, required = _read_setting(self.directory, key), _read_setting(expected.directory, key)
            if actual != required and not (is_base and None in (actual, required)):
                yield f"config.json: {key}", actual, required
        tokens, wanted_tokens = (_read_tokenizer(each.directory) for each in (self, expected))
        if tokens != wanted_tokens:
            yield "tokenizer.json", f"{len(tokens):,} other bytes", f"the same {len(wanted_tokens):,} bytes"
        names = expected.files.keys() if is_base else self.files.keys() | expected.files.keys()
        for name in sorted(names):
            if name not in self.files or name not in expected.files:
                yield f"tensor {name}", *(("none", "one") if name in expected.files else ("one", "none"))
                continue
            actual, required = self.files[name][1], expected.files[name][1]
            if actual.shape != required.shape:
                yield f"tensor {name}: shape", actual.shape, required.shape
            if actual.dtype != required.dtype and not (casts or is_base):
                yield (
                    f"tensor {name}: dtype",
                    f"{actual.dtype} (set the dtype of the sum to convert it)",
                    required.dtype,
                )


def compare_parents(parents: Sequence[Parent], *, unrelated: bool, casts: bool, base: Parent | None = None) -> None:
    """Raise BadInput if one of the policies is not valid, or if their merge is not meaningful. Tensor shapes,
    tokenizers, settings and, unless `unrelated`, the initial policies of their runs must agree. The message names the
    first difference. With `casts`, dtypes may differ, because the sum is cast to one dtype.

    `base` is the base model of the merge. Unless `unrelated`, it must be the initial policy of the runs, if that is
    recorded."""
    for parent in (*parents, *([] if base is None else [base])):
        check_directory(parent.path)
    first, *others = parents
    expected = Outline.read(first.path)
    for other in others:
        for place, actual, required in Outline.read(other.path).find_differences(expected, casts=casts):
            raise BadInput(
                f"merge: only policies with the same architecture and tokenizer can be merged, but {other.name} "
                f"differs from {first.name} in {place}: expected {required}, found {actual}"
            )
    if base is not None:
        for place, actual, required in Outline.read(base.path).find_differences(expected, casts=True, is_base=True):
            raise BadInput(
                f"merge: the base model must have the architecture and tokenizer of the policies, but {base.name} "
                f"differs from {first.name} in {place}: expected {required}, found {actual}"
            )
    with_start = [parent for parent in parents if parent.start]
    if base is not None and with_start and not unrelated and policy_digest(base.path) != with_start[0].start:
        raise BadInput(
            f"merge: the run of {with_start[0].name} began with the policy with digest {with_start[0].start[:16]}, but "
            f"the base model {base.name} has the digest {policy_digest(base.path)[:16]}. Name the initial policy as "
            "the base model. To merge them anyway, use --unrelated (`allow_unrelated = true`)"
        )
    for other in with_start[1:]:
        if other.start != with_start[0].start and not unrelated:
            raise BadInput(
                f"merge: {with_start[0].name} was trained from the policy with digest {with_start[0].start[:16]}, but "
                f"{other.name} from {other.start[:16]}. A merge of policies with different initial policies is hardly "
                "meaningful. To merge them anyway, use --unrelated (`allow_unrelated = true`)"
            )


# ---- the sum
def write_merge(work: MergeWork) -> Merge:
    """Write the merged policy and a merge.json into an empty directory, with the file layout of the first policy.
    Returns the contents of merge.json. Raises BadInput before anything is written if the policies do not match. Also
    raises BadInput, while writing, if an integer or boolean tensor differs between them."""
    compare_parents(work.parents, unrelated=work.unrelated, casts=work.dtype is not None, base=work.method.base)
    if work.adapters == "ranks":
        _write_adapter_sum(work)
    else:
        write_full_merge(work)
    merge = Merge(
        parents=tuple(map(_record_parent, work.parents)),
        adapters=work.adapters,
        method=work.method.settings.model_dump(mode="json", exclude={"base"}),
        base=None if work.method.base is None else _record_parent(work.method.base),
    )
    (work.target / MERGE).write_text(merge.text())
    return merge


def _record_parent(parent: Parent) -> MergedParent:
    return MergedParent(
        name=parent.name,
        weight=parent.weight,
        digest=policy_digest(parent.path),
        start=parent.start,
        base=recorded_base(parent.path),
    )


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float], *, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of tensors, computed in float32 in the given order and cast to `dtype`. If all tensors
    are equal, only cast the first. Raises ValueError if tensors differ that are not floating-point."""
    return merge_tensor(LinearMerge(), TensorVersions("", tensors, weights), dtype=dtype)


def policy_digest(directory: Path) -> str:
    """Return the digest by which a run identifies the policy from which it started. The digest is computed from the
    files that a run copies, and for an adapter also from its base model."""
    paths = weight_files(directory) if not is_adapter(directory) else [directory / TENSORS]
    settings_files = (path for pattern in KEPT for path in directory.glob(pattern) if path.is_file())
    paths_by_name = {
        path.name: path for path in (*paths, *settings_files) if path.name != CONTENTS and not path.name.startswith(".")
    }
    files = {name: describe_pieces(_iter_chunks(path)) for name, path in sorted(paths_by_name.items())}
    own_digest = Contents(files=files).ref("").digest
    return (
        own_digest
        if not is_adapter(directory)
        else blake3(f"{policy_digest(find_base(directory))}+{own_digest}".encode()).hexdigest()
    )


@torch.no_grad()
def write_full_merge(work: MergeWork, *, on_progress: Callable[[], None] = lambda: None) -> dict[str, BundledFile]:
    """Write the merged policy as a complete model, without checks of the parents and without merge.json. Return the
    size and digest of each weight file by name. `on_progress` is called after each tensor. Raises BadInput if an
    integer or boolean tensor differs between the parents."""
    files: dict[str, BundledFile] = {}
    dtype = None if work.dtype is None else DTYPES[{"float32": "F32", "bfloat16": "BF16"}[work.dtype]]
    readers, weights = [_build_reader(parent.path) for parent in work.parents], [each.weight for each in work.parents]
    first = Outline.read(work.parents[0].path)
    read_base = None if work.method.base is None else _build_reader(work.method.base.path)

    def outline(name: str) -> TensorOutline:
        stored = first.files[name][1]
        casts = dtype is not None and stored.dtype.is_floating_point
        return TensorOutline(dtype, stored.shape) if casts and dtype is not None else stored

    def make(name: str) -> Tensor:
        try:
            base = None if read_base is None else read_base(name)
            versions = TensorVersions(name, [read(name) for read in readers], weights, base)
            on_progress()
            return merge_tensor(work.method.settings, versions, dtype=outline(name).dtype)
        except ValueError as error:
            raise BadInput(f"merge: tensor {name}: {error}") from error

    for path in weight_files(first.directory):
        outlines = {name: outline(name) for name, (file, _) in first.files.items() if file == path}
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
        files[path.name] = write_hashed(work.target / path.name, streamed_pieces(outlines, make, metadata=metadata))
    if (first.directory / INDEX).is_file():
        _write_index(first, work.target, [outline(name) for name in first.files])
    if work.dtype is not None:
        config = json.loads((first.directory / "config.json").read_text())
        stale = {key: work.dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": work.dtype}
        (work.target / "config.json").write_text(json.dumps(config | stale, indent=2, sort_keys=True) + "\n")
    copy_config_files(first.directory, work.target)
    return files


def _write_index(first: Outline, target: Path, outlines: Sequence[TensorOutline]) -> None:
    index = json.loads((first.directory / INDEX).read_text())
    size = sum(outline.dtype.itemsize * torch.Size(outline.shape).numel() for outline in outlines)
    index["metadata"] = {**index.get("metadata", {}), "total_size": size}
    (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _build_reader(directory: Path) -> Callable[[str], Tensor]:
    """Return a function that reads one tensor of a policy by name. For an adapter, the tensor is the sum of base and
    adapter. A file is open only while a tensor is read, so that its memory pages are released."""
    outline = Outline.read(directory)

    def read(name: str) -> Tensor:
        path, _ = outline.files[name]
        with safe_open(path, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    if not is_adapter(directory):
        return read
    adapter, model = read_adapter(directory), meta_policy(directory)
    changed = [f"{layer}.weight" for layer in adapter.deltas] + [*adapter.replaced]
    if missing := [name for name in changed if name not in outline.files]:
        raise BadInput(
            f"merge: adapter {directory} changes the weight {missing[0]}, which the files of its base model "
            f"{outline.directory} do not contain. Write the adapter as one model first (`rheostat export-policy`)"
        )
    return lambda name: add_adapter(read(name), name, adapter=adapter, model=model)


# ---- adapters over one base, written as one adapter
@torch.no_grad()
def _write_adapter_sum(work: MergeWork) -> None:
    """Write the weighted sum of LoRA adapters as one adapter, by concatenating their factors: Σ λ_i s_i B_i A_i = [λ_1
    s_1 B_1, …] [A_1; …]. Its rank is the sum of all ranks, its dtype float32 and its scale 1. Raises BadInput if a
    policy is not a LoRA adapter of the same base model."""
    adapters, weights = _read_joinable_adapters(work), [each.weight for each in work.parents]
    layers = sorted({name for adapter in adapters for name in adapter.deltas})
    tensors = dict[str, Tensor]()
    for name in layers:
        a_RI, b_OR = _join_factors(name, adapters, weights)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a_RI, f"base_model.model.{name}.lora_B.weight": b_OR}
    for name in adapters[0].replaced:
        if any(name not in adapter.replaced for adapter in adapters):
            raise BadInput(
                f"merge: with adapters = 'ranks', either all adapters or none must replace the weight {name}, but at "
                "least one does not replace it. Use adapters = 'full'"
            )
        tensors[f"base_model.model.{name}"] = weighted_sum(
            [adapter.replaced[name] for adapter in adapters], weights, dtype=torch.float32
        )
    save_tensors(tensors, work.target / TENSORS, metadata={"format": "pt"})
    settings = json.loads((work.parents[0].path / SETTINGS).read_text())
    rank = sum(adapter.rank for adapter in adapters)
    settings |= {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": layers,
        "base_model_name_or_path": str(find_base(work.parents[0].path)),
    }
    if on_hub := recorded_base(work.parents[0].path):
        settings |= {"base_model_name_or_path": on_hub.partition("@")[0], "revision": on_hub.rpartition("@")[2]}
    settings |= {name: plain for name, plain in _ONE_SCALE.items() if settings.get(name)}
    (work.target / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True))


def _read_joinable_adapters(work: MergeWork) -> list[Adapter]:
    """Read the adapters of a merge whose ranks are joined. Raises BadInput unless the merge is a weighted sum of LoRA
    adapters of the same base model."""
    if work.method != WEIGHTED_SUM:
        raise BadInput(
            "merge: adapters = 'ranks' only writes weighted sums, but the result of the method "
            f"{work.method.settings.label!r} has no low rank. Use adapters = 'full'"
        )
    for parent in work.parents:
        if not is_adapter(parent.path):
            raise BadInput(
                f"merge: adapters = 'ranks' joins the ranks of adapters, but {parent.name} is a full model. Use "
                "adapters = 'full'"
            )
    bases = [find_base(parent.path) for parent in work.parents]
    for parent, base in zip(work.parents, bases, strict=True):
        if base != bases[0] and policy_digest(base) != policy_digest(bases[0]):
            raise BadInput(
                "merge: adapters = 'ranks' needs adapters of the same base model, but the base model of "
                f"{parent.name} is {base}, not {bases[0]}. Use adapters = 'full'"
            )
    adapters = [read_adapter(parent.path) for parent in work.parents]
    for parent, adapter in zip(work.parents, adapters, strict=True):
        if adapter.has_magnitudes:
            raise BadInput(
                f"merge: adapters = 'ranks' joins the ranks of LoRA adapters, but {parent.name} is a DoRA adapter, "
                "whose changes of the weights have no low rank. Use adapters = 'full'"
            )
    return adapters


def _join_factors(name: str, adapters: Sequence[Adapter], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the factors A and B of the summed adapter in the layer `name`. Adapters that do not change the layer
    contribute zeros."""
    shape = next(adapter.deltas[name] for adapter in adapters if name in adapter.deltas)
    a_RI, b_OR = list[Tensor](), list[Tensor]()
    for adapter, weight in zip(adapters, weights, strict=True):
        delta = adapter.deltas.get(name)
        if delta is None:
            a_RI.append(torch.zeros(adapter.rank, shape.a_RI.shape[1]))
            b_OR.append(torch.zeros(shape.b_OR.shape[0], adapter.rank))
        else:
            spare = adapter.rank - len(delta.a_RI)  # with rank_pattern, layers have different ranks
            a_RI.append(functional.pad(delta.a_RI.float(), (0, 0, 0, spare)))
            b_OR.append(functional.pad(delta.b_OR.float() * (weight * delta.scale), (0, spare)))
    return torch.cat(a_RI), torch.cat(b_OR, dim=1)


# ---- files
def _iter_files(directory: Path) -> Iterator[tuple[str, tuple[Path, TensorOutline]]]:
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    tensor = opened.get_slice(name)
                    dtype = DTYPES.get(tensor.get_dtype())
                    if dtype is None:
                        raise BadInput(
                            f"merge: {path}: tensor {name} has the type {tensor.get_dtype()}, but only floating-point "
                            "and integer tensors can be merged. Use an unquantized model"
                        )
                    yield name, (path, TensorOutline(dtype, tuple(tensor.get_shape())))
        except SafetensorError as error:
            raise BadInput(
                f"merge: the weight file {path} cannot be loaded: {error}. Copy or download the file again"
            ) from error


def _read_setting(directory: Path, key: str) -> Any:  # noqa: ANN401 -- JSON
    """Return the setting `key` of a model's config.json. In models with several parts, such as a vision tower, the
    language model's setting is used if there is no common one."""
    config = json.loads((directory / "config.json").read_text())
    return config.get(key, (config.get("text_config") or {}).get(key))


def _read_tokenizer(directory: Path) -> bytes:
    path = directory / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""


def _iter_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
