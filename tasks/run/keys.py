"""Names (keys) under which a run stores its results, one manifest per key. Only this module builds and parses them.

policy/base                          a model, or the prompts: committed once, before the first iteration
judge-style/model                    the model that scores the reward `style`
it-0003/credit                       a stage of an iteration
it-0003/rollout/0001                 one shard of a stage in the first batch of an iteration
it-0003/wave-2/rollout/0001          the same in the second batch
eval-0010/summary                    a stage of an evaluation
policy/sft/eval-0000/scoring/0000    one shard of the evaluation of a policy before the first iteration
rescore/strict/it-0003/seal          later result from stored rollouts, by its kind and its name
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
    """Key under which a run stores one result, for example `it-0003/rollout/0001`. The properties return parts of the
    key."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a key. Raises ValueError if the text is not a valid key."""
        key = cls(text)
        key._parts()
        return key

    @classmethod
    def of(cls, batch: str, stage: str, shard: int | None = None) -> Self:
        """Return the key of one stage of a batch, or of one shard of the stage. Stages that run once per iteration use
        the key of the iteration's first batch."""
        return cls.parse(f"{batch}/{stage}" if shard is None else f"{batch}/{stage}/{shard:04d}")

    @classmethod
    def policy(cls, number: int) -> Self:
        """Return the key of the policy after `number` iterations."""
        return cls.of(iteration_key(number), "update") if number else cls.parse("policy/initial")

    @classmethod
    def critic(cls, number: int) -> Self:
        """Return the key of the critic after `number` iterations. An update stores critic and policy under the same
        key."""
        return cls.policy(number) if number else cls.parse("critic/initial")

    @classmethod
    def reward_model(cls, term: str, *, is_base: bool = False) -> Self:
        """Return the key of the model that scores a reward. With `is_base`, return the key of the model before its
        training."""
        return cls.parse(f"{reward_model_role(term)}/{'base' if is_base else 'model'}")

    @classmethod
    def teacher(cls, number: int) -> Self:
        """Return the key of a teacher: number 0 is the teacher for all other problems, 1 the first specialist."""
        return cls.parse(f"teacher/specialist-{number}" if number else "teacher/model")

    def with_prefix(self, prefix: str) -> Self:
        """Return the key of the same stage in a rescoring or recredit, whose stored keys begin with `prefix`. An
        empty prefix changes nothing."""
        return self.parse(f"{prefix}{self}")

    @property
    def derived_prefix(self) -> str:
        """Prefix of the key if it belongs to a rescoring or recredit, such as `rescore/strict/`. Otherwise empty."""
        return self._parts()["derived"] or ""

    @property
    def without_prefix(self) -> Self:
        """Key of the same stage in the run itself, without the prefix of a rescoring or recredit."""
        return self.parse(self.removeprefix(self.derived_prefix))

    def with_stage(self, stage: str) -> Self:
        """Return the key of another stage for the same batch and shard."""
        return self.of(self.rpartition(f"/{self.stage}")[0], stage, self.shard)

    @property
    def stage(self) -> str:
        """Name of the stage, for example `rollout`."""
        return self._parts()["stage"] or "terms"

    @property
    def iteration(self) -> int:
        """Number of the iteration. Raises ValueError if the key belongs to no iteration."""
        return self._number("iteration")

    @property
    def evaluation(self) -> int:
        """Number of iterations done before the evaluation. Raises ValueError if the key belongs to no evaluation."""
        return self._number("evaluation")

    @property
    def is_evaluation(self) -> bool:
        """Whether the key belongs to an evaluation on held-out prompts."""
        return self._parts()["evaluation"] is not None

    @property
    def number(self) -> int:
        """Number of the iteration, or number of iterations done before the evaluation. Raises ValueError if the key
        belongs to neither."""
        return self.iteration if self._parts()["iteration"] else self.evaluation

    @property
    def wave(self) -> int:
        """Number of the batch in its iteration, counted from 1."""
        return int(self._parts()["wave"] or 1)

    @property
    def shard(self) -> int | None:
        """Number of the shard, or None if the stage has one result for all shards."""
        shard = self._parts()["shard"]
        return None if shard is None else int(shard)

    def _number(self, part: str) -> int:
        digits = self._parts()[part]
        if digits is None:
            raise ValueError(f"{str(self)!r} does not contain the number of an {part}, such as it-0003 or eval-0003")
        return int(digits)

    def _parts(self) -> re.Match[str]:
        parts = _KEY.fullmatch(self)
        if parts is None:
            raise ValueError(f"{str(self)!r} is not the key of a stage. Keys of stages look like it-0003/rollout/0001")
        return parts


BASE, SFT, DPO = (StageKey.parse(f"policy/{stage}") for stage in ("base", "sft", "dpo"))
"""Keys of the initial policy before training on data, after supervised fine-tuning, and after DPO."""

PROMPTS = {split: StageKey.parse(f"prompts/{split}") for split in ("train", "heldout")}
"""Keys of the prompts, by split ("train" or "heldout")."""

USER_BASE, USER = (StageKey.parse(f"user/{stage}") for stage in ("base", "model"))
"""Keys of the simulated user's model, before and after its training."""


def iteration_key(number: int, wave: int = 1) -> str:
    """Return the first part of all keys of an iteration, or of one of its later batches (waves). Both numbers count
    from 1."""
    return f"it-{number:04d}" if wave == 1 else f"it-{number:04d}/wave-{wave}"


def evaluation_key(number: int, *, policy: str = "") -> str:
    """Return the first part of all keys of the evaluation after `number` iterations. `policy` is the key of a policy
    that is evaluated before the first iteration."""
    return f"{policy}/eval-{number:04d}" if policy else f"eval-{number:04d}"


def iteration_numbers(folders: Iterable[str]) -> list[int]:
    """Return the numbers of the iterations that have a folder. `folders` are the top-level folders of a run."""
    matches = (re.fullmatch(f"it-({_NUMBER})", folder) for folder in folders)
    return [int(folder[1]) for folder in matches if folder is not None]


def reward_model_role(term: str) -> str:
    """Return the role name of the workers that compute the scores of a reward model. The stage that stores these
    scores has the same name."""
    return f"judge-{term}"


def artifact_key(name: str) -> str:
    """Return the name of a run as an artifact key of Prefect, which allows lower-case letters, digits and dashes."""
    return name.replace(".", "-").replace("_", "-")
