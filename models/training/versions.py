"""The models that an update rank keeps in memory, each at a published version; how a trained one becomes the next.

The optimizer's state is one safetensors file per rank, and a JSON file that says whose they are. Rank 0 writes all of
them, one rank's after another, so no shared disk is needed; every rank reads its own.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.bundles import BundledFile, fetch_bundle, publish_bundle, write_hashed
from infra.store.checksums import canonical_json
from infra.store.storage import Store
from models.config.objectives import UpdateConfig
from models.modeling.adapters import load_trainable
from models.modeling.critic import TokenValues, load_critic
from models.modeling.logprobs import TokenLogprobs, TokenModule
from models.modeling.policy import load_policy
from models.records.versions import ModelVersion
from models.training.ranks import Ranks, any_rank, broadcast_bytes, gather_bytes
from models.training.trainer import Trainer, zero_stage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LAYOUT = "state.json"


class StateLayout(Settings):
    """How the state was spread; only ranks that are spread alike can continue with it."""

    world_size: int
    """Ranks that shared it."""
    zero_stage: int
    """DeepSpeed's stage."""
    dtype: str
    """Precision of the weights."""


def save_state(trainer: Trainer, directory: Path, *, update: UpdateConfig, ranks: Ranks) -> dict[str, BundledFile]:
    """Write every rank's state into a directory of rank 0; say what the ranks' files are."""
    moments = {name: value.detach().cpu().contiguous() for name, value in trainer.moments().items()}
    written = {
        _file_name(rank): write_hashed(directory / _file_name(rank), [data])
        for rank, data in enumerate(gather_bytes(save(moments), ranks))
    }
    if ranks.rank == 0:
        (directory / _LAYOUT).write_bytes(canonical_json(_layout(update, ranks).model_dump()))
    return written


def load_state(trainer: Trainer, directory: Path, *, update: UpdateConfig, ranks: Ranks) -> None:
    """Continue with this rank's state from a verified directory; no pickle is ever read."""
    expected = _layout(update, ranks)
    found = json.loads((directory / _LAYOUT).read_text())
    if found != expected.model_dump():
        raise BadInput(f"optimizer state {directory.name}: expected {expected.model_dump()}, found {found}")
    try:
        moments = load_file(directory / _file_name(ranks.rank))
    except SafetensorError as error:
        raise Damaged(f"optimizer state {directory.name}, rank {ranks.rank}: {error}") from error
    trainer.load_moments(moments)


def _layout(update: UpdateConfig, ranks: Ranks) -> StateLayout:
    return StateLayout(world_size=ranks.world_size, zero_stage=zero_stage(update), dtype=update.dtype)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


_WEIGHTS = (".safetensors", ".safetensors.index.json")

_VERSION = TypeAdapter(ModelVersion)


def publish_policy(
    store: Store, trainer: Trainer, *, version: int, parent: ModelVersion, state_of: UpdateConfig | None, ranks: Ranks
) -> ModelVersion:
    """Publish from rank 0 and tell all ranks; without `state_of` the next update starts a fresh optimizer.

    Where adapters are trained, the new version has its parent's weights and an adapter of its own.
    """
    with store.scratch() as scratch:
        trained, state = scratch / "trained", scratch / "state"
        trained.mkdir()
        state.mkdir()
        written = trainer.save_weights(trained)
        states = {} if state_of is None else save_state(trainer, state, update=state_of, ranks=ranks)
        encoded = b""
        if ranks.rank == 0:
            adapter = None
            if trainer.trains_adapters:
                weights, adapter = parent.weights, publish_bundle(store, trained, prefix="adapters", written=written)
            else:
                _copy_beside_weights(fetch_bundle(store, parent.weights), trained)
                prefix = parent.weights.key.rpartition("/")[0]
                weights = publish_bundle(store, trained, prefix=prefix, written=written)
            published = ModelVersion(
                version=version,
                weights=weights,
                state=None if state_of is None else publish_bundle(store, state, prefix="states", written=states),
                adapter=adapter,
            )
            encoded = _VERSION.dump_json(published)
        return _VERSION.validate_json(broadcast_bytes(encoded, ranks))


def _copy_beside_weights(parent: Path, directory: Path) -> None:
    """Copy the tokenizer and whatever else the parent has beside weights and what was written anew."""
    for source in sorted(path for path in parent.iterdir() if path.is_file()):
        target = directory / source.name
        if source.name != "bundle.json" and not source.name.endswith(_WEIGHTS) and not target.exists():
            shutil.copyfile(source, target)


logger = logging.getLogger(__name__)

Build = Callable[[ModelVersion], TokenModule]
"""Loads the verified weights of a version."""


class Learner:
    """Keeps one trainer hot between iterations; every rank holds one and they act together.

    Whether it was hot or is loaded anew, the same version gives the same trainer, bit for bit.
    """

    def __init__(self, store: Store, build: Build, config: UpdateConfig, *, ranks: Ranks) -> None:
        self._store = store
        self._build = build
        self._config = config
        self._ranks = ranks
        self._trainer: Trainer | None = None
        self._at: ModelVersion | None = None

    def stand_at(self, version: ModelVersion) -> Trainer:
        """Return a trainer at the version, loading it on every rank unless every rank is there; it counts as left."""
        hot = self._trainer is not None and self._at is not None and _same_model(self._at, version)
        self._at = None
        if any_rank(not hot, self._ranks):
            trainer = self.begin_at(version)
            if version.state is not None:
                load_state(trainer, fetch_bundle(self._store, version.state), update=self._config, ranks=self._ranks)
            return trainer
        assert self._trainer is not None
        return self._trainer

    def asked_at(self, version: ModelVersion) -> Trainer:
        """Return a trainer at the version that is only asked and learns nothing, so that it stays there."""
        trainer = self.stand_at(version)
        self._at = version
        return trainer

    def begin_at(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights and a fresh optimizer."""
        self.close()
        self._trainer = Trainer(self._build(version), self._config, ranks=self._ranks)
        logger.info("loaded %s", version.digest)
        return self._trainer

    def publish(self, parent: ModelVersion, *, version: int, with_state: bool = True) -> ModelVersion:
        """Publish what was learnt since `parent`; without state the next update starts a fresh optimizer."""
        assert self._trainer is not None, "publish before stand_at"
        published = publish_policy(
            self._store,
            self._trainer,
            version=version,
            parent=parent,
            state_of=self._config if with_state else None,
            ranks=self._ranks,
        )
        self._at = published
        return published

    def close(self) -> None:
        """Give the memory back."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._at = None


def _same_model(one: ModelVersion, other: ModelVersion) -> bool:
    """Whether only the count of updates differs, as after one that was discarded."""
    return replace(one, version=other.version) == other


class LoadedModels:
    """Each is loaded when it is first asked for, and again where another version is asked for."""

    def __init__(self, store: Store, update: UpdateConfig, *, temperature: float, ranks: Ranks) -> None:
        self.ranks = ranks
        self.policy = Learner(store, self._actor, update, ranks=ranks)
        self.critic = Learner(store, self._valuer, update, ranks=ranks)
        self._store = store
        self._update = update
        self._temperature = temperature
        self._reference: tuple[str, TokenLogprobs] | None = None
        self._teacher: tuple[str, TokenLogprobs] | None = None

    def reference(self, version: ModelVersion) -> TokenLogprobs:
        """A policy that is compared with and never trained; it has no adapter."""
        if self._reference is None or self._reference[0] != version.digest:
            self._reference = None
            model = load_policy(fetch_bundle(self._store, version.weights)).requires_grad_(False).eval()
            policy = TokenLogprobs(model, temperature=self._temperature)
            self._reference = (version.digest, policy.to(self.ranks.device))
        return self._reference[1]

    def teacher(self, version: ModelVersion) -> TokenLogprobs:
        """A model that is asked and never trained; every rank holds all of it."""
        if self._teacher is None or self._teacher[0] != version.digest:
            self._teacher = None
            directory = fetch_bundle(self._store, version.weights)
            teacher = load_teacher(
                directory, dtype=self._update.dtype, temperature=self._temperature, device=self.ranks.device
            )
            self._teacher = (version.digest, teacher)
        return self._teacher[1]

    def close(self) -> None:
        """Give the memory of what is trained back."""
        self.policy.close()
        self.critic.close()

    def _actor(self, version: ModelVersion) -> TokenLogprobs:
        model = load_trainable(self._store, version, load=load_policy, lora=self._update.lora)
        return TokenLogprobs(model, temperature=self._temperature)

    def _valuer(self, version: ModelVersion) -> TokenValues:
        return TokenValues(load_trainable(self._store, version, load=load_critic, lora=self._update.lora))


def load_teacher(
    directory: Path, *, dtype: Literal["float32", "bfloat16"], temperature: float, device: torch.device
) -> TokenLogprobs:
    """Load a model of the run. In the update's precision, and over its passes, equal weights say exactly the same."""
    model = load_policy(directory, dtype=DTYPES[dtype])
    return TokenLogprobs(model, temperature=temperature).requires_grad_(False).eval().to(device)
