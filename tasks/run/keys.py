"""Manifest keys: what each part of them means, written and read in this one place.

policy/base                          a model, or the prompts: made once, before the first iteration
judge-style/model                    the model behind the reward `style`
it-0003/credit                       a stage of an iteration
it-0003/rollout/0001                 one shard of a stage of an iteration's first batch
it-0003/wave-2/rollout/0001          the same of its second batch
eval-0010/summary                    a stage of an evaluation
policy/sft/eval-0000/scoring/0000    one shard of the measurement of a policy before the first iteration
rescore/strict/it-0003/seal          what was made of stored rollouts later, by its kind and its name
"""

import re
from collections.abc import Iterable
from typing import Self

_NUMBER = r"\d{4}|[1-9]\d{4,}"

_KEY = re.compile(
    rf"""
    (?P<derived> (?:rescore|recredit)/[^/]+/ )?
    (?: (?: (?P<batch> it-(?P<iteration>{_NUMBER}) (?:/wave-(?P<wave>[2-9]|[1-9]\d+))?
                     | (?:policy/[^/]+/)? eval-(?P<evaluation>{_NUMBER}) )
          | policy | critic | teacher | user | prompts | retention | judge-[^/]+ )
        /(?P<stage>[^/]+) (?:/(?P<shard>{_NUMBER}))?
      | terms )
    """,
    re.VERBOSE,
)


class StageKey(str):
    """Key of what a stage committed: the very string that the store has, which says what it names."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a key. Raises ValueError if it is none."""
        key = cls(text)
        key._parts()
        return key

    @classmethod
    def of(cls, batch: str, stage: str, shard: int | None = None) -> Self:
        """Key of a stage of a batch, or of one shard of it; the batch of an iteration as a whole is its first."""
        return cls.parse(f"{batch}/{stage}" if shard is None else f"{batch}/{stage}/{shard:04d}")

    @classmethod
    def policy(cls, number: int) -> Self:
        """Key of the policy after `number` iterations."""
        return cls.of(iteration_key(number), "update") if number else cls.parse("policy/initial")

    @classmethod
    def critic(cls, number: int) -> Self:
        """Key of the critic after `number` iterations, where there is one: it is committed with the policy."""
        return cls.policy(number) if number else cls.parse("critic/initial")

    @classmethod
    def reward_model(cls, term: str, *, made: bool = False) -> Self:
        """Key of the model behind a served reward, or of what was made before its training."""
        return cls.parse(f"{reward_model_role(term)}/{'base' if made else 'model'}")

    def below(self, prefix: str) -> Self:
        """The key of the same thing in a re-scoring or re-credit; no prefix leaves it."""
        return self.parse(f"{prefix}{self}")

    @property
    def derived(self) -> str:
        """Prefix of the re-scoring or re-credit that it belongs to; empty for the run itself."""
        return self._parts()["derived"] or ""

    @property
    def stored(self) -> Self:
        """The key of the same thing in the run itself."""
        return self.parse(self.removeprefix(self.derived))

    def at(self, stage: str) -> Self:
        """The key of the same batch, and of the same shard, at another stage."""
        return self.of(self.rpartition(f"/{self.stage}")[0], stage, self.shard)

    @property
    def stage(self) -> str:
        """Such as `rollout`."""
        return self._parts()["stage"] or "terms"

    @property
    def iteration(self) -> int:
        """Number of its iteration. Raises ValueError if it is of none."""
        return self._number("iteration")

    @property
    def evaluation(self) -> int:
        """Iterations before its evaluation. Raises ValueError if it is of none."""
        return self._number("evaluation")

    @property
    def is_evaluation(self) -> bool:
        """Whether it is of an evaluation, whose prompts are held out."""
        return self._parts()["evaluation"] is not None

    @property
    def after(self) -> int:
        """Number of its iteration, or of those before its evaluation. Raises ValueError if it is of neither."""
        return self.iteration if self._parts()["iteration"] else self.evaluation

    @property
    def wave(self) -> int:
        """Number of the batch in its iteration."""
        return int(self._parts()["wave"] or 1)

    @property
    def shard(self) -> int | None:
        """Number of the shard; none where all of a stage has one key."""
        shard = self._parts()["shard"]
        return None if shard is None else int(shard)

    def _number(self, part: str) -> int:
        written = self._parts()[part]
        if written is None:
            raise ValueError(f"{str(self)!r} has no number of an {part}")
        return int(written)

    def _parts(self) -> re.Match[str]:
        parts = _KEY.fullmatch(self)
        if parts is None:
            raise ValueError(f"{str(self)!r} is no key of a stage: expected one like it-0003/rollout/0001")
        return parts


BASE, SFT, DPO = (StageKey.parse(f"policy/{stage}") for stage in ("base", "sft", "dpo"))
"""Keys of the policy before, and after, each stage of training on data alone."""

PROMPTS = {split: StageKey.parse(f"prompts/{split}") for split in ("train", "heldout")}
"""Keys of the prompts of each split."""

TEACHER = StageKey.parse("teacher/model")
"""Key of the teacher's model."""


USER_BASE, USER = (StageKey.parse(f"user/{stage}") for stage in ("base", "model"))
"""Keys of the model that plays the user, before and after its training."""


def iteration_key(number: int, wave: int = 1) -> str:
    """Prefix of an iteration's manifests, or of those of one of its further batches; iterations count from 1."""
    return f"it-{number:04d}" if wave == 1 else f"it-{number:04d}/wave-{wave}"


def evaluation_key(number: int, *, policy: str = "") -> str:
    """Prefix of the manifests of the evaluation after `number` iterations, or of an earlier policy's measurement."""
    return f"{policy}/eval-{number:04d}" if policy else f"eval-{number:04d}"


def iterations_among(folders: Iterable[str]) -> list[int]:
    """Numbers of the iterations that have manifests, from the first parts of keys."""
    found = (re.fullmatch(f"it-({_NUMBER})", folder) for folder in folders)
    return [int(folder[1]) for folder in found if folder is not None]


def reward_model_role(term: str) -> str:
    """Role of the workers that serve a reward; also the stage that its verdicts are filed under."""
    return f"judge-{term}"


def artifact_key(name: str) -> str:
    """A run's name as Prefect wants artifact keys: lower-case letters, digits and dashes."""
    return name.replace(".", "-").replace("_", "-")
