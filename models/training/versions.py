"""The models that an update rank keeps in memory, each at a published version; how a trained one becomes the next."""

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor

from infra.errors import Damaged
from infra.store.bundles import describe_bundle, fetch_bundle, has_bundle, publish_bundle
from infra.store.storage import Store
from models.config.attention import Attention
from models.config.denoising import DenoisingConfig
from models.config.objectives import UpdateConfig
from models.denoising.pipeline import FrozenParts, is_pipeline, link_beside_denoiser, load_denoiser, read_pipeline
from models.denoising.steps import Drawing, StepLogprobs
from models.modeling.adapters import load_trainable
from models.modeling.critic import TokenValues, load_critic
from models.modeling.layout import MicroBatch
from models.modeling.logprobs import TokenLogprobs, TokenModule
from models.modeling.policy import freeze, learns_to_see, load_policy, load_sight
from models.records.media import Gallery, ImageSource
from models.records.versions import ModelVersion
from models.training.ranks import Ranks, any_rank, broadcast_bytes
from models.training.states import StateWriter, load_state
from models.training.trainer import Forward, Moments, Trainer, frozen_forward
from models.vision.families import ImageTokens
from models.vision.processor import load_processor

NEAR: Final = 0.25
"""How far an update on other ranks may end from the committed one, as a share of its own length; 1 is no relation."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = (".safetensors", ".safetensors.index.json")

_VERSION = TypeAdapter(ModelVersion)


def publish_version(
    store: Store,
    trainer: Trainer,
    *,
    version: int,
    parent: ModelVersion,
    ranks: Ranks,
    put: Literal["durable", "early", "not"],
) -> ModelVersion:
    """Publish from rank 0 and tell all ranks what there is now, without a state; or only say what it would be.

    What is put `early` may be used, and is to be synced before a manifest names it.
    Where adapters are trained, the new version has its parent's weights and an adapter of its own.
    """
    with store.scratch() as scratch:
        written = trainer.save_weights(scratch)
        encoded = b""
        if ranks.rank == 0:
            prefix = "adapters" if trainer.trains_adapters else parent.weights.key.rpartition("/")[0]
            if not trainer.trains_adapters:
                _copy_beside_weights(fetch_bundle(store, parent.weights), scratch)
            if put == "not":
                bundle = describe_bundle(scratch, written=written).ref(prefix)
            else:
                bundle = publish_bundle(store, scratch, prefix=prefix, written=written, durable=put == "durable")
            part = {"adapter" if trainer.trains_adapters else "weights": bundle}
            encoded = _VERSION.dump_json(replace(parent, version=version, state=None, **part))
        return _VERSION.validate_json(broadcast_bytes(encoded, ranks))


def _copy_beside_weights(parent: Path, directory: Path) -> None:
    """Copy the tokenizer and whatever else the parent has beside weights and what was written anew."""
    if is_pipeline(parent):
        link_beside_denoiser(parent, directory)
        return
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
        self._at: tuple[int, str] | None = None
        """Number and digest of the version at which the trainer stands, with its optimizer's state."""

    @property
    def trainer(self) -> Trainer:
        """The one that is hot."""
        assert self._trainer is not None, "a trainer was loaded"
        return self._trainer

    def leave(self, version: ModelVersion) -> Trainer | None:
        """Return the trainer if it stands at the version on every rank; it counts as left."""
        hot = self._at == _name(version)
        self._at = None
        return None if any_rank(not hot, self._ranks) else self._trainer

    def asked_at(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights, which is asked and learns nothing; its state may be missing."""
        stored = version.state is not None and has_bundle(self._store, version.state)
        trainer = self.leave(version)
        is_whole = trainer is not None or stored or not version.version
        if trainer is None:
            trainer = self.load(version) if stored else self.begin_at(version)
        self._at = _name(version) if is_whole else None
        return trainer

    def begin_at(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights and a fresh optimizer."""
        self.close()
        self._trainer = Trainer(self._build(version), self._config, ranks=self._ranks)
        logger.info("loaded %s", version.digest)
        return self._trainer

    def load(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights, and its state if it has one."""
        trainer = self.begin_at(version)
        if version.state is not None:
            load_state(trainer, self._store, version.state, update=self._config, ranks=self._ranks)
        return trainer

    def stand_at(self, version: ModelVersion, *, came_from: Sequence[Tensor]) -> Trainer:
        """Return a trainer with the version's weights and the optimizer's state that is there.

        Raises Damaged unless the weights that are there are near the version's, measured by the update's own length
        from the weights that it came from: the same samples on other ranks end there.
        """
        weights, moments = ([each.clone() for each in self.trainer.weights()], _copied(self.trainer.moments()))
        trainer = self.begin_at(version)
        off, length = (_distance(trainer.weights(), others) for others in (weights, came_from))
        if any_rank(not off <= NEAR * length, self._ranks):
            raise Damaged(
                f"policy {version.version}: its update was taken again on other ranks; expected weights within "
                f"{NEAR:.0%} of the update's length, found {off / length if length else math.inf:.0%}"
            )
        trainer.load_moments(moments)
        return trainer

    def publish(self, parent: ModelVersion, *, version: int, put: Literal["durable", "early"]) -> ModelVersion:
        """Publish what was learnt since `parent`, without a state."""
        published = self._published(parent, version=version, put=put)
        self._at = _name(published)
        return published

    def describe(self, parent: ModelVersion, *, version: int) -> ModelVersion:
        """Say what `publish` would return; nothing is put into the store."""
        return self._published(parent, version=version, put="not")

    def follow(self, parent: ModelVersion, following: ModelVersion) -> None:
        """Take the next version for its parent, which has all that it has."""
        if self._at == _name(parent):
            self._at = _name(following)

    def close(self) -> None:
        """Give the memory back."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._at = None

    def _published(
        self, parent: ModelVersion, *, version: int, put: Literal["durable", "early", "not"]
    ) -> ModelVersion:
        return publish_version(self._store, self.trainer, version=version, parent=parent, ranks=self._ranks, put=put)


def check_arrival(found: ModelVersion, expected: ModelVersion, *, iteration: int) -> None:
    """Raise Damaged where an update that is taken again does not lead to the version that was committed."""
    if found != expected:
        raise Damaged(
            f"iteration {iteration}: its update was taken again from its samples, to get back the optimizer's "
            f"state; expected {_told(expected)}, found {_told(found)}: samples, code or libraries are others now"
        )


def _told(version: ModelVersion) -> str:
    state = "" if version.state is None else f" with state {version.state.digest}"
    return f"weights {version.digest}{state}"


def _copied(moments: Moments) -> Moments:
    return {name: value.detach().clone() for name, value in moments.items()}


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    squares = [float((a.float() - b.float()).square().sum()) for a, b in zip(one, other, strict=True)]
    return math.sqrt(sum(squares))


def _name(version: ModelVersion) -> tuple[int, str]:
    return version.version, version.digest


class LoadedModels:
    """Each is loaded when it is first asked for, and again where another version is asked for."""

    def __init__(
        self,
        store: Store,
        update: UpdateConfig,
        *,
        temperature: float,
        ranks: Ranks,
        on_progress: Callable[[], None],
        denoising: DenoisingConfig | None = None,
    ) -> None:
        self.ranks = ranks
        self.images = Gallery()
        self.states = StateWriter(store, update, ranks=ranks, on_progress=on_progress)
        self.policy = Learner(store, self._actor, update, ranks=ranks)
        self.critic = Learner(store, self._valuer, update, ranks=ranks)
        self._store = store
        self._update = update
        self._temperature = temperature
        self._denoising = denoising
        self._frozen = FrozenParts(device=ranks.device)
        self._images: tuple[ImageTokens | None] | None = None
        """Of all versions of the policy; none before one was asked for."""
        self._reference: tuple[str, TokenModule] | None = None
        self._teacher: tuple[str, TokenLogprobs] | None = None

    def image_tokens(self, version: ModelVersion) -> ImageTokens | None:
        """What tells how much the tower under training reads in a pass; nothing where it reads each image once."""
        if self._denoising is not None or (not self._update.trains_sight and self._update.zero_stage < 3):
            return None
        if self._images is None:
            processor = load_processor(fetch_bundle(self._store, version.weights))
            self._images = (None if processor is None else processor.image_tokens,)
        return self._images[0]

    def step_tokens(self, version: ModelVersion) -> int | None:
        """Tokens that the denoiser of a policy that draws reads a state as; none of one that writes."""
        if self._denoising is None:
            return None
        return read_pipeline(fetch_bundle(self._store, version.weights)).tokens(self._denoising)

    def reference(self, version: ModelVersion, *, policy: ModelVersion) -> Forward:
        """Ask a policy that is compared with and never trained; it has no adapter.

        Where adapters of that very policy are trained, the one under training is asked, at `policy`, without them: in
        the update's precision, and no second model is held.
        """
        if self.is_base(version, policy):
            return self.policy.trainer.base_forward
        return partial(frozen_forward, self._loaded_reference(version))

    def reference_means(self, version: ModelVersion, *, policy: ModelVersion) -> Forward:
        """Ask a policy that draws and is compared with for the means of denoising steps, as `reference` does."""
        if self.is_base(version, policy):
            return self.policy.trainer.base_means
        module = self._loaded_reference(version)

        def means(batch: MicroBatch) -> Tensor:
            frozen_forward(module, batch)
            return module.means

        return means

    @property
    def draws(self) -> bool:
        """Whether the policy draws."""
        return self._denoising is not None

    def is_base(self, version: ModelVersion, policy: ModelVersion) -> bool:
        """Whether a version is the policy under training without its adapters."""
        return self._update.lora is not None and version.adapter is None and version.weights == policy.weights

    def _loaded_reference(self, version: ModelVersion) -> TokenModule:
        if self._reference is None or self._reference[0] != version.digest:
            self._reference = None
            directory = fetch_bundle(self._store, version.weights)
            if self._denoising is not None:
                steps = StepLogprobs(load_denoiser(directory), self._drawing(directory), self.images)
                self._reference = (version.digest, steps.requires_grad_(False).eval().to(self.ranks.device))
                return self._reference[1]
            model = load_policy(directory).requires_grad_(False).eval()
            sight = load_sight(directory, source=self.images, stays=True)
            policy = TokenLogprobs(
                model, temperature=self._temperature, sight=sight, attention=self._update.wide_attention
            ).to(self.ranks.device)
            policy.slice_rows(self.ranks.slicing)
            self._reference = (version.digest, policy)
        return self._reference[1]

    def teacher(self, version: ModelVersion) -> TokenLogprobs:
        """A model that is asked and never trained; every rank holds all of it."""
        if self._teacher is None or self._teacher[0] != version.digest:
            self._teacher = None
            directory = fetch_bundle(self._store, version.weights)
            teacher = load_teacher(
                directory,
                dtype=self._update.dtype,
                attention=self._update.attention,
                temperature=self._temperature,
                images=self.images,
                device=self.ranks.device,
            )
            teacher.slice_rows(self.ranks.slicing)
            self._teacher = (version.digest, teacher)
        return self._teacher[1]

    def close(self) -> None:
        """Give the memory of what is trained back."""
        self.policy.close()
        self.critic.close()

    def _actor(self, version: ModelVersion) -> TokenModule:
        if self._denoising is not None:
            denoiser = load_trainable(self._store, version, load=load_denoiser, lora=self._update.lora)
            return StepLogprobs(denoiser, self._drawing(fetch_bundle(self._store, version.weights)), self.images)
        model = load_trainable(self._store, version, load=load_policy, lora=self._update.lora)
        freeze(model, self._update.freeze)
        # The parts of weights that ranks of stage 3 hold are gathered for all ranks' passes alike.
        stays = self._update.zero_stage < 3 and not learns_to_see(model)
        sight = load_sight(fetch_bundle(self._store, version.weights), source=self.images, stays=stays)
        return TokenLogprobs(
            model,
            temperature=self._temperature,
            sight=sight,
            attention=self._update.attention,
            replays_experts=self._update.router_replay is not None,
        )

    def _drawing(self, directory: Path) -> Drawing:
        assert self._denoising is not None, "the policy draws"
        return Drawing.of(directory, self._denoising, self._frozen)

    def _valuer(self, version: ModelVersion) -> TokenValues:
        model = load_trainable(self._store, version, load=load_critic, lora=self._update.lora)
        return TokenValues(model, attention=self._update.attention)


def load_teacher(
    directory: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    attention: Attention | None = None,
    temperature: float,
    images: ImageSource | None = None,
    device: torch.device,
) -> TokenLogprobs:
    """Load a model of the run. As the update computes, and over its passes, equal weights say exactly the same."""
    model = load_policy(directory, dtype=DTYPES[dtype])
    sight = load_sight(directory, source=images, stays=True)
    teacher = TokenLogprobs(model, temperature=temperature, sight=sight, attention=attention)
    return teacher.requires_grad_(False).eval().to(device)
