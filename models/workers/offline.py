"""Training on data that no policy of the run generated: worked examples for policies, judges and simulated users, and
preferences.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from infra.store.bundles import fetch_bundle
from infra.store.progress import StepNotes
from infra.store.storage import Store
from models.config.data import DataConfig, PreferencesConfig
from models.config.denoising import DenoisingConfig
from models.config.objectives import UpdateConfig
from models.config.training import WarmupConfig
from models.data.examples import Example, Preference, load_preferences, picture_examples, warmup_examples
from models.data.images import digest_of
from models.data.problems import Problem
from models.denoising.pipeline import FrozenParts, load_denoiser, read_pipeline
from models.denoising.policy import policy_context
from models.denoising.steps import Drawing, Imitation, picture_inputs
from models.environments.transcripts import user_examples
from models.judges.prompts import judge_examples
from models.modeling.batching import Sequences
from models.modeling.critic import TokenValues, critic_from_policy
from models.modeling.logprobs import TokenLogprobs
from models.modeling.policy import load_policy, load_sight
from models.objectives.losses import DpoTerms, PairTerms, bradley_terry, dpo
from models.records.media import Gallery, HeldImages
from models.records.versions import ModelVersion, Outcome
from models.records.work import JudgeWarmupWork, PreferenceWork, RewardModelWork, UserWarmupWork, WarmupWork
from models.text.sequences import SequencePair, policy_pairs, reward_pairs
from models.text.tokenizer import load_tokenizer, tokenize_problems, with_room
from models.training.offline import (
    Learnt,
    Listener,
    PairLearning,
    PairNumbers,
    imitate,
    imitate_inputs,
    learn_preferences,
)
from models.training.ranks import Ranks
from models.training.trainer import Trainer
from models.training.versions import Build, Learner
from models.vision.processor import load_processor


class OfflineTrainer:
    """Trainer of the models that a run starts from. Every rank has one, and all ranks call it together.

    Each work unit starts with a fresh optimizer and publishes a version without an optimizer state.
    """

    def __init__(
        self,
        store: Store,
        update: UpdateConfig,
        *,
        ranks: Ranks,
        on_progress: Callable[[], None],
        denoising: DenoisingConfig | None = None,
    ) -> None:
        self._store = store
        self._update = update
        self._denoising = denoising
        self._ranks = ranks
        self._on_progress = on_progress
        self._images = Gallery()

    def warmup(self, work: WarmupWork) -> Outcome:
        """Fine-tune the policy on worked examples, or on images for a text-to-image policy."""
        if self._denoising is not None:
            return self._imitate_pictures(work, self._denoising)
        among = partial(self._with_room, work) if work.data.too_long == "drop" else None
        examples = warmup_examples(work.data, work.warmup, work.seed, among=among)
        return self._imitate(work.policy, examples, work.warmup, ranks=self._ranks)

    def _with_room(self, work: WarmupWork, problems: list[Problem]) -> list[Problem]:
        directory = fetch_bundle(self._store, work.policy.weights)
        prompts = tokenize_problems(problems, load_tokenizer(directory), load_processor(directory))
        room = policy_context(directory) - work.max_new_tokens
        asked = with_room([*zip(problems, prompts, strict=True)], max_tokens=room, too_long="drop", split="train")
        return [problem for problem, _ in asked]

    def warm_judge(self, work: JudgeWarmupWork) -> Outcome:
        """Fine-tune a judge on correct and incorrect completions."""
        examples = judge_examples(work.data, work.reward, work.warmup, work.seed)
        return self._imitate(work.judge, examples, work.warmup, ranks=self._ranks.apart)

    def warm_user(self, work: UserWarmupWork) -> Outcome:
        """Fine-tune the simulated user (the model that plays the user) on worked episodes."""
        examples = user_examples(work.environment, work.data, warmup=work.warmup, seed=work.seed)
        return self._imitate(work.user, examples, work.warmup, ranks=self._ranks.apart)

    def prefer(self, work: PreferenceWork) -> Outcome:
        """Train the policy on preferences with DPO. The policy before training serves as the reference."""
        directory, dpo_config = fetch_bundle(self._store, work.policy.weights), work.dpo
        tokenizer, context = load_tokenizer(directory), policy_context(directory)

        def read(preferences: Sequence[Preference]) -> list[SequencePair]:
            return policy_pairs(preferences, tokenizer, context=context)

        def loss(found: PairNumbers, start: PairNumbers) -> DpoTerms:
            return dpo(
                *found,
                reference_chosen_P=start.chosen_P,
                reference_rejected_P=start.rejected_P,
                beta=dpo_config.beta,
                label_smoothing=dpo_config.label_smoothing,
            )

        train, heldout = map(read, _both(work.preferences, work.data, work.seed))
        learning = PairLearning(train, heldout, schedule=work.dpo, loss=loss, against="start", seed=work.seed)
        return self._learn(work.policy, learning, self._logprobs)

    def train_reward_model(self, work: RewardModelWork) -> Outcome:
        """Train a reward model on preferences: the policy's decoder with a new head that must score preferred
        completions higher.
        """
        directory = fetch_bundle(self._store, work.policy.weights)
        tokenizer, context = load_tokenizer(directory), policy_context(directory)

        def read(preferences: Sequence[Preference]) -> list[SequencePair]:
            return reward_pairs(preferences, tokenizer, template=work.template, context=context)

        def loss(found: PairNumbers, _: PairNumbers) -> PairTerms:
            return bradley_terry(*found, centering=work.training.centering)

        train, heldout = map(read, _both(work.preferences, work.data, work.seed))
        learning = PairLearning(train, heldout, schedule=work.training, loss=loss, against="nothing", seed=work.seed)
        return self._learn(work.policy, learning, self._rewards)

    def _imitate(
        self, model: ModelVersion, examples: Sequence[Example], warmup: WarmupConfig, *, ranks: Ranks
    ) -> Outcome:
        self._images.source = HeldImages({digest_of(image): image for each in examples for image in each.images})

        def learn(trainer: Trainer, listener: Listener) -> Learnt:
            return imitate(
                trainer,
                examples,
                warmup=warmup,
                directory=fetch_bundle(self._store, model.weights),
                microbatch_tokens=self._update.microbatch_tokens,
                ranks=ranks,
                listener=listener,
            )

        return self._train(model, self._logprobs, learn, ranks=ranks)

    def _imitate_pictures(self, work: WarmupWork, denoising: DenoisingConfig) -> Outcome:
        directory, warmup = fetch_bundle(self._store, work.policy.weights), work.warmup
        drawing = Drawing.of(directory, denoising, FrozenParts(device=self._ranks.device))
        examples = picture_examples(work.data, warmup, work.seed)
        inputs = picture_inputs(examples, drawing.tokenizer, seed=work.seed)
        self._images.source = HeldImages({digest_of(picture): picture for _, picture in examples})
        tokens = read_pipeline(directory).tokens(denoising)

        def build(version: ModelVersion) -> Imitation:
            return Imitation(load_denoiser(fetch_bundle(self._store, version.weights)), drawing, self._images)

        def learn(trainer: Trainer, listener: Listener) -> Learnt:
            return imitate_inputs(
                trainer,
                inputs,
                warmup=warmup,
                sequences=lambda chosen: Sequences.apart([tokens] * len(chosen)),
                microbatch_tokens=self._update.microbatch_tokens,
                ranks=self._ranks,
                listener=listener,
            )

        return self._train(work.policy, build, learn, ranks=self._ranks)

    def _learn(self, model: ModelVersion, learning: PairLearning, build: Build) -> Outcome:
        def learn(trainer: Trainer, listener: Listener) -> Learnt:
            budget = self._update.microbatch_tokens
            return learn_preferences(trainer, learning, microbatch_tokens=budget, ranks=self._ranks, listener=listener)

        return self._train(model, build, learn, ranks=self._ranks)

    def _train(
        self, model: ModelVersion, build: Build, learn: Callable[[Trainer, Listener], Learnt], *, ranks: Ranks
    ) -> Outcome:
        clock = time.perf_counter
        begun = clock()
        learner = Learner(self._store, build, self._update, ranks=ranks)
        trainer = learner.begin_at(model)
        loaded = clock()
        notes = StepNotes(self._store if self._ranks.rank == 0 else None)
        learnt = learn(trainer, Listener(self._on_progress, notes.tell))
        notes.end()
        stepped = clock()
        policy = learner.publish(model, version=model.version, put="durable")
        learner.close()
        timings = {"load": loaded - begun, "steps": stepped - loaded, "save": clock() - stepped}
        return Outcome(model=policy, metrics=learnt.metrics, detail={"losses": [*learnt.curve()]}, timings=timings)

    def _logprobs(self, version: ModelVersion) -> TokenLogprobs:
        directory = fetch_bundle(self._store, version.weights)
        sight = load_sight(directory, source=self._images)
        return TokenLogprobs(load_policy(directory), temperature=1.0, sight=sight, attention=self._update.attention)

    def _rewards(self, version: ModelVersion) -> TokenValues:
        directory = fetch_bundle(self._store, version.weights)
        model = critic_from_policy(directory)
        # The classifier needs this token to find the end of a text, but imported policies often name it only in their
        # tokenizer.
        model.config.get_text_config().pad_token_id = load_tokenizer(directory).pad_token_id
        return TokenValues(model, attention=self._update.attention)


def _both(preferences: PreferencesConfig, data: DataConfig, seed: int) -> tuple[list[Preference], list[Preference]]:
    train, heldout = (load_preferences(preferences, data, split=split, seed=seed) for split in ("train", "heldout"))
    return train, heldout
