"""Facts about the inputs of a run, which the checks of its parts share. Importing this module does not import
transformers."""

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from rheostat.infra.config import PoolsConfig
from rheostat.infra.trackers.config import TrackerConfig
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.conflicts import slot_engines
from rheostat.models.config.data import DataConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.promotion import SuiteCheck
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.training import DpoConfig, EvaluationConfig, WarmupConfig
from rheostat.models.data.problems import Problem, identity, load_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rheostat.models.inspection.directory import Inspected
    from rheostat.models.text.tokenizer import TokenizedProblems, ToolSchema
    from rheostat.models.vision.processor import VisionProcessor


class Inputs(BaseModel):
    """Parts of a run's configuration that the preflight check reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seed: int
    data: DataConfig
    policy: PolicyConfig
    warmup: WarmupConfig | None
    preferences: PreferencesConfig | None
    dpo: DpoConfig | None
    rollout: RolloutConfig
    scoring: ScoringConfig
    algorithm: AlgorithmConfig
    update: UpdateConfig
    pools: PoolsConfig
    evaluation: EvaluationConfig
    checked: SuiteCheck | None = None
    """Training data and policy with which the problems of a retrain's evaluation suite are compared, or None for other
    runs."""
    tracking: tuple[TrackerConfig, ...] = ()
    giving_way: tuple[str, ...] = ()
    """Configuration keys that the user did not set. If there are too few problems, the defaults of these keys are
    lowered instead of failing."""


class InputFacts:
    """Facts about the inputs of a run. Each is found when a check first reads it. Reading a fact raises BadInput if the
    inputs that it depends on are invalid."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.numbers: dict[str, float] = {}
        """Numbers that earlier checks found."""

    @cached_property
    def train(self) -> list[Problem]:
        """Training problems."""
        return load_problems(self.inputs.data, "train", self.inputs.seed)

    @cached_property
    def heldout(self) -> list[Problem]:
        """Held-out problems."""
        return load_problems(self.inputs.data, "heldout", self.inputs.seed)

    @property
    def problems(self) -> list[Problem]:
        """Training problems, followed by the held-out problems."""
        return [*self.train, *self.heldout]

    @property
    def imitated(self) -> list[Problem]:
        """Problems on whose answers the warm-up trains a language policy. Empty if there is no such warm-up."""
        warmup = self.inputs.warmup
        return [] if warmup is None or warmup.chats or self.inputs.policy.picture_side is not None else self.train

    @cached_property
    def policy(self) -> "Inspected":
        """Description of the initial policy, with its shape and tokenizer."""
        from rheostat.models.inspection.directory import inspect_policy
        from rheostat.models.text.tokenizer import problem_texts

        return inspect_policy(self.inputs.policy, problem_texts(self.train))

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Tokenizer of the policy."""
        return self.policy.tokenizer

    @cached_property
    def processor(self) -> "VisionProcessor | None":
        """Image processor of the policy, or None if the policy reads only text."""
        return self.policy.load_processor(self.inputs.data.pixels)

    @cached_property
    def image_tokens(self) -> int:
        """Number of tokens that training processes for one generated image, or 0 if the policy generates text."""
        denoising, texts = (
            self.inputs.rollout.denoising,
            [(each.source, identity(each.prompt)) for each in self.problems],
        )
        return 0 if denoising is None else self.policy.check_drawing(denoising, texts)

    @cached_property
    def tools(self) -> "tuple[ToolSchema, ...]":
        """Tools of the environment, which prompts describe to the policy."""
        from rheostat.models.environments.runtime import tools_of

        return tools_of(self.inputs.rollout.environment, self.problems)

    @cached_property
    def prompts(self) -> "tuple[TokenizedProblems, TokenizedProblems]":
        """Training problems and held-out problems with prompts that leave room for a completion, each with its
        tokens."""
        from rheostat.models.text.tokenizer import enforce_prompt_length, tokenize_problems

        data, problems = self.inputs.data, self.problems
        tokenized = tokenize_problems(problems, self.tokenizer, self.processor, tools=self.tools, rules=data.text_rules)
        pairs, number = [*zip(problems, tokenized, strict=True)], len(self.train)
        room = self.policy.shape.context - self.inputs.rollout.sampling.max_new_tokens
        train, heldout = (
            enforce_prompt_length(asked, max_tokens=room, too_long=data.long_prompts, split=split)
            for split, asked in (("train", pairs[:number]), ("heldout", pairs[number:]))
        )
        return train, heldout

    @cached_property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(prompt.input) for _, prompt in chain(*self.prompts))

    @property
    def longest_tokens(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self.longest_prompt + self.inputs.rollout.sampling.max_new_tokens

    def gpus(self, engine: str) -> float:
        """Return the number of GPUs of each worker that runs an engine, given the configuration key of the engine."""
        slots = {name: slots for name, _, slots in slot_engines(self.inputs.rollout, self.inputs.scoring)}
        return slots[engine] * self.inputs.pools.gpus_per_worker
