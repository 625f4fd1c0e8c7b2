"""Models that an update rank keeps in memory."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import nn

from rheostat.infra.store.bundles import fetch_bundle, has_bundle
from rheostat.infra.store.contracts import Store
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.denoising.forward_process import PictureErrors
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser, read_pipeline
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs, StepModule
from rheostat.models.modeling.adapters import load_trainable
from rheostat.models.modeling.critic import TokenValues, load_critic
from rheostat.models.modeling.head import TopTokens
from rheostat.models.modeling.logprobs import TokenLogprobs, TokenModule
from rheostat.models.modeling.policy import freeze, load_policy, load_vision, trains_vision
from rheostat.models.modeling.trials import float32_trials
from rheostat.models.records.media import Gallery
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from rheostat.models.training.frozen import FrozenModel, load_frozen_policy
from rheostat.models.training.publishing import Put, publish_version
from rheostat.models.training.ranks import Ranks, any_rank
from rheostat.models.training.sharding import choose_storage
from rheostat.models.training.states import StateWriter, load_state
from rheostat.models.training.trainer import Forward, Moments, Trainer
from rheostat.models.vision.families import ImageTokens
from rheostat.models.vision.processor import load_processor

logger = logging.getLogger(__name__)

Build = Callable[[ModelVersion], TokenModule]
"""Function that builds a module for training from the verified weights of a policy version."""


class ResidentTrainer:
    """Trainer that stays in memory between iterations, so that a version need not be loaded again. Every rank has one,
    and all ranks call its methods together.

    The weights and optimizer state of a version are bit-for-bit the same, whether kept in memory or loaded again.
    """

    def __init__(
        self, store: Store, build: Build, config: UpdateConfig, *, ranks: Ranks, on_progress: Callable[[], None]
    ) -> None:
        """Create an object without a trainer. `on_progress` is called while rank 0 writes a published model."""
        self._store = store
        self._build = build
        self._config = config
        self._ranks = ranks
        self._on_progress = on_progress
        self._trainer: Trainer | None = None
        self._loaded_version: tuple[int, str] | None = None
        """Number and digest of the version whose weights and optimizer state are in the trainer, or None if they belong
        to no version."""

    @property
    def trainer(self) -> Trainer:
        """Trainer that is in memory. Must not be read before a version has been loaded."""
        assert self._trainer is not None, "a trainer was loaded"
        return self._trainer

    def take_over(self, version: ModelVersion) -> Trainer | None:
        """Return the trainer in memory if it contains `version` on all ranks, or else None. The caller may then train
        it further. Collective: every rank must call this."""
        hot = self._loaded_version == _name(version)
        self._loaded_version = None
        return None if any_rank(not hot, self._ranks) else self._trainer

    def load_for_inference(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights for forward passes only. The optimizer state may be missing.

        Collective: every rank must call this.
        """
        stored = version.state is not None and has_bundle(self._store, version.state)
        trainer = self.take_over(version)
        is_whole = trainer is not None or stored or not version.version
        if trainer is None:
            trainer = self.load(version) if stored else self.load_with_fresh_optimizer(version)
        self._loaded_version = _name(version) if is_whole else None
        return trainer

    def load_with_fresh_optimizer(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights and a fresh optimizer. A trainer in memory is closed first."""
        self.close()
        self._trainer = Trainer(self._build(version), self._config, ranks=self._ranks)
        logger.info("Loaded weights %s", version.digest)
        return self._trainer

    def load(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights and, if the version has one, its optimizer state."""
        trainer = self.load_with_fresh_optimizer(version)
        if version.state is not None:
            load_state(trainer, self._store, version.state, update=self._config, ranks=self._ranks)
        return trainer

    def load_keeping_moments(self, version: ModelVersion) -> Trainer:
        """Return a trainer with the version's weights and the optimizer's moments that are now in memory. Used after an
        update was repeated and gave the version's weights only approximately. Collective: every rank must call this."""
        moments = _copy_moments(self.trainer.moments())
        trainer = self.load_with_fresh_optimizer(version)
        trainer.load_moments(moments)
        return trainer

    def publish(self, parent: ModelVersion, *, version: int, put: Put) -> ModelVersion:
        """Publish the model trained from `parent` as a version without an optimizer state. `put` selects how the files
        are stored. Collective: all ranks must call it."""
        published = self._published(parent, version=version, put=put)
        self._loaded_version = _name(published)
        return published

    def describe(self, parent: ModelVersion, *, version: int) -> ModelVersion:
        """Return the version that `publish` would return, without writing to the store. Collective: all ranks must call
        this."""
        return self._published(parent, version=version, put="not")

    def relabel(self, parent: ModelVersion, following: ModelVersion) -> None:
        """Record that the trainer now contains the version `following`, which has the same weights and optimizer state
        as `parent`."""
        if self._loaded_version == _name(parent):
            self._loaded_version = _name(following)

    def close(self) -> None:
        """Release the memory of the trainer. The next load builds a new trainer."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._loaded_version = None

    def _published(self, parent: ModelVersion, *, version: int, put: Put) -> ModelVersion:
        return publish_version(
            self._store,
            self.trainer,
            version=version,
            parent=parent,
            ranks=self._ranks,
            put=put,
            on_progress=self._on_progress,
        )


def _copy_moments(moments: Moments) -> Moments:
    return {name: value.detach().clone() for name, value in moments.items()}


def _name(version: ModelVersion) -> tuple[int, str]:
    return version.version, version.digest


class LoadedModels:
    """Cache of the models that one update rank uses. A model is loaded on first use, and again if another version is
    needed."""

    def __init__(
        self,
        store: Store,
        update: UpdateConfig,
        *,
        temperature: float,
        ranks: Ranks,
        on_progress: Callable[[], None],
        denoising: DenoisingConfig | None = None,
        top_k: int = 0,
    ) -> None:
        """Create the cache. `top_k` is the number of most probable tokens that teachers return at each completion
        token."""
        self.ranks = ranks
        self.images = Gallery()
        self.states = StateWriter(store, update, ranks=ranks, on_progress=on_progress)
        self.policy = ResidentTrainer(store, self._build_actor, update, ranks=ranks, on_progress=on_progress)
        self.critic = ResidentTrainer(store, self._build_valuer, update, ranks=ranks, on_progress=on_progress)
        self._store = store
        self._update = update
        self._temperature = temperature
        self._denoising = denoising
        self._top_k = top_k
        self._frozen = FrozenParts(device=ranks.device)
        self._setup: GenerationSetup | None = None
        self._images: tuple[ImageTokens | None] | None = None
        """Image-token settings in a tuple of one element, or None until they are first needed. They are the same for
        all versions."""
        self._reference = _FrozenVersion(self._build_reference)
        self._teacher = _FrozenVersion(self._build_teacher)

    def image_tokens(self, version: ModelVersion) -> ImageTokens | None:
        """Return the settings from which the number of image tokens per micro-batch is planned. Returns None if the
        vision tower encodes each image only once, because it is not trained, or if the policy has no tower."""
        if self._denoising is not None or not (self._update.trains_vision or self._update.shards_weights):
            return None
        if self._images is None:
            processor = load_processor(fetch_bundle(self._store, version.weights))
            self._images = (None if processor is None else processor.image_tokens,)
        return self._images[0]

    def step_tokens(self, version: ModelVersion) -> int | None:
        """Return the number of tokens that a text-to-image policy processes per denoising step, or None for other
        policies."""
        if self._denoising is None:
            return None
        return read_pipeline(fetch_bundle(self._store, version.weights)).tokens(self._denoising)

    def reference(self, version: ModelVersion, *, policy: ModelVersion) -> Forward:
        """Return the forward function of the reference, the frozen policy from which the KL divergence is measured. The
        reference has no adapter.

        If adapters of the same base model are being trained, the policy under training (at version `policy`) is run
        with its adapters disabled, in the update's precision. Then no second model is loaded.
        """
        if self.is_base(version, policy):
            return self.policy.trainer.base_forward
        return self._reference.load(version).forward

    def reference_means(self, version: ModelVersion, *, policy: ModelVersion) -> Forward:
        """Return a function that computes the reference's mean of the next state at each denoising step. Only for
        text-to-image policies."""
        if self.is_base(version, policy):
            return self.policy.trainer.base_means
        return self._reference.load(version).means

    @property
    def generates_images(self) -> bool:
        """Whether the policy is a text-to-image policy."""
        return self._denoising is not None

    def is_base(self, version: ModelVersion, policy: ModelVersion) -> bool:
        """Return whether `version` equals the policy under training (at version `policy`) with its adapters
        disabled."""
        return self._update.lora is not None and version.adapter is None and version.weights == policy.weights

    def announce_prompts(self, inputs: Iterable[ModelInput]) -> None:
        """Announce the prompts that the text encoders of a text-to-image policy will encode soon. Has no effect before
        such a policy is loaded."""
        if self._setup is not None:
            self._setup.announce_prompts(inputs)

    def teacher(self, version: ModelVersion) -> Forward:
        """Return the forward function of a teacher, a model with the weights of `version` that is never trained. If the
        teacher returns its most probable tokens, the policy must be loaded before the teacher."""
        return self._teacher.load(version).forward

    def policy_as_teacher(self) -> Forward:
        """Return the forward function of the policy in memory as its own teacher, which may return its most probable
        tokens."""
        return partial(self.policy.trainer.forward, top=self._top_tokens)

    @property
    def _top_tokens(self) -> TopTokens | None:
        """Choice of the most probable tokens that teachers return, or None if they return none."""
        return TopTokens(self._top_k, self.policy.trainer.vocab_size) if self._top_k else None

    def close(self) -> None:
        """Release the memory of all models."""
        for models in (self.policy, self.critic, self._reference, self._teacher):
            models.close()

    def _build_actor(self, version: ModelVersion) -> TokenModule:
        if self._denoising is not None:
            load = partial(load_denoiser, storage=choose_storage(self._update, ranks=self.ranks))
            denoiser = load_trainable(self._store, version, load=load, lora=self._update.lora)
            return self._build_step_module(denoiser, fetch_bundle(self._store, version.weights))
        read = partial(load_policy, storage=choose_storage(self._update, ranks=self.ranks))
        model = load_trainable(self._store, version, load=read, lora=self._update.lora)
        freeze(model, self._update.freeze)
        # Under ZeRO-3 every rank must take part in the gathering of weights, so the tower runs in every micro-batch.
        stays = not self._update.shards_weights and not trains_vision(model)
        vision = load_vision(fetch_bundle(self._store, version.weights), source=self.images, is_frozen=stays)
        with float32_trials():
            return TokenLogprobs(
                model,
                temperature=self._temperature,
                vision=vision,
                attention=self._update.attention,
                replays_experts=self._update.router_replay is not None,
            )

    def _build_step_module(self, denoiser: nn.Module, directory: Path) -> StepModule:
        """Return the module that computes the inputs of the configured loss with this denoiser, whose pipeline is in
        `directory`."""
        build = PictureErrors if self._update.loss.uses_forward_process else StepLogprobs
        return build(denoiser, self._build_setup(directory), self.images)

    def _build_setup(self, directory: Path) -> GenerationSetup:
        assert self._denoising is not None, "text-to-image policies have [rollout.denoising]"
        self._setup = GenerationSetup.load(directory, self._denoising, self._frozen)
        return self._setup

    def _build_valuer(self, version: ModelVersion) -> TokenValues:
        load = partial(load_critic, storage=choose_storage(self._update, ranks=self.ranks))
        model = load_trainable(self._store, version, load=load, lora=self._update.lora)
        with float32_trials():
            return TokenValues(model, attention=self._update.attention)

    def _build_reference(self, version: ModelVersion) -> FrozenModel:
        update = self._update.for_reference
        if self._denoising is None:
            return self._build_frozen(version, update)
        directory = fetch_bundle(self._store, version.weights)
        denoiser = load_denoiser(directory, storage=choose_storage(update, ranks=self.ranks))
        return FrozenModel(self._build_step_module(denoiser, directory), update, ranks=self.ranks)

    def _build_teacher(self, version: ModelVersion) -> FrozenModel:
        return self._build_frozen(version, self._update, top=self._top_tokens)

    def _build_frozen(
        self, version: ModelVersion, update: UpdateConfig, *, top: TopTokens | None = None
    ) -> FrozenModel:
        directory = fetch_bundle(self._store, version.weights)
        return load_frozen_policy(
            directory, update, temperature=self._temperature, images=self.images, top=top, ranks=self.ranks
        )


class _FrozenVersion:
    """Version of a model that is never trained. It stays in memory until another version is needed."""

    def __init__(self, build: Callable[[ModelVersion], FrozenModel]) -> None:
        self._build = build
        self._loaded: tuple[str, FrozenModel] | None = None

    def load(self, version: ModelVersion) -> FrozenModel:
        """Return the model of a version. Another version in memory is released first. Collective under ZeRO-3."""
        if self._loaded is None or self._loaded[0] != version.digest:
            self.close()
            self._loaded = (version.digest, self._build(version))
        return self._loaded[1]

    def close(self) -> None:
        """Release the memory of the model."""
        if self._loaded is not None:
            self._loaded[1].close()
        self._loaded = None
