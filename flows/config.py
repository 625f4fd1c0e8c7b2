"""The configuration of a run: one frozen model composed of the rooms' own, read from TOML and `dotted.key=value`."""

import copy
import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from infra.config import PoolsConfig, Settings
from infra.errors import BadInput
from models.config import (
    AlgorithmConfig,
    ArithmeticData,
    DataConfig,
    EvaluationConfig,
    Grpo,
    PolicyConfig,
    RetentionConfig,
    RolloutConfig,
    ScoringConfig,
    ScratchPolicy,
    UpdateConfig,
    WarmupConfig,
)


class ControllersConfig(Settings):
    """The parallel controllers of the rollout and scoring roles."""

    count: Annotated[int, Field(ge=1, le=256)] = 2
    """Controllers per role; each owns a slice of the iteration's shards."""
    where: Literal["nested", "deployment"] = "nested"
    """Sub-flows of this process, or runs of the deployments `rollout/controller` and `scoring/controller`."""
    silence_seconds: Annotated[float, Field(gt=0)] = 900
    """Longest time a scoring controller waits for the next commit of its rollout peer, in seconds."""


class RunConfig(Settings):
    """Everything that a run is made from."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "run"
    """Name of the run in its store."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root of every random choice of the run."""
    store: str = "./runs"
    """Where runs lie: a directory, or a file:// URI."""
    iterations: Annotated[int, Field(ge=0, le=1_000_000)] = 24
    """Iterations of rollout, scoring and update; a finished run goes on when this grows."""
    data: DataConfig = ArithmeticData()
    """The problems."""
    policy: PolicyConfig = ScratchPolicy()
    """The initial policy."""
    warmup: WarmupConfig | None = None
    """Supervised warm-up of the initial policy; none leaves it as it is."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    scoring: ScoringConfig = ScoringConfig()
    """Rewards."""
    algorithm: AlgorithmConfig = Grpo()
    """From rewards to advantages."""
    update: UpdateConfig = UpdateConfig()
    """From advantages to a better policy."""
    pools: PoolsConfig = PoolsConfig()
    """Worker processes."""
    controllers: ControllersConfig = ControllersConfig()
    """Flow controllers."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    retention: RetentionConfig = RetentionConfig()
    """How long policies keep their files."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "RunConfig":
        if isinstance(self.data, ArithmeticData) and self.evaluation.problems > self.data.heldout_problems:
            asked, made = self.evaluation.problems, self.data.heldout_problems
            raise ValueError(f"evaluation.problems {asked} exceeds data.heldout_problems {made}")
        if self.rollout.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature 0 makes every completion of a group the same: use above 0")
        return self

    def identity(self) -> dict[str, JsonValue]:
        """What results depend on: a run continues only under the same identity."""
        elsewhere = {"name", "store", "controllers", "retention", "pools"}
        if self.update.schedule == "constant":
            elsewhere.add("iterations")
        identity: dict[str, JsonValue] = self.model_dump(mode="json", exclude=elsewhere)
        identity["pools"] = {"update_ranks": self.pools.update_ranks, "threads": self.pools.threads}
        return identity

    def fingerprint(self) -> str:
        """Digest of the identity, 16 hex digits."""
        return hashlib.blake2b(json.dumps(self.identity(), sort_keys=True).encode(), digest_size=8).hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `dotted.key=value` overrides and validate. Raises BadInput in one line."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise BadInput(f"no configuration file {path}{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    return override_config(document, overrides, source=str(path))


def override_config(document: Mapping[str, object], overrides: Sequence[str], *, source: str) -> RunConfig:
    """Apply `dotted.key=value` overrides to a document and validate it."""
    changed = copy.deepcopy(dict(document))
    for override in overrides:
        _apply(changed, override)
    return parse_config(changed, source=source)


def parse_config(document: Mapping[str, object], *, source: str) -> RunConfig:
    """Validate a configuration document. Raises BadInput naming the key, what was expected and the nearest name."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{source}: {_explain(error)}") from None


def _apply(document: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise BadInput(f"override {override!r}: expected dotted.key=value")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.split(".")
    table = document
    for name in tables:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise BadInput(f"override {override!r}: {name!r} is not a table")
        table = inner
    table[last] = value


def _explain(error: ValidationError) -> str:
    """The first problem in one line, with the count of the others."""
    problems = error.errors()
    # An unknown key is the likelier cause when it comes with complaints about the values around it.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = [part for part in first["loc"] if isinstance(part, int | str)]
    key = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), _siblings(path), n=1)
        text = f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    else:
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        text = f"{key}: {message}, got {first['input']!r:.80}" if key else message
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _siblings(path: Sequence[int | str]) -> list[str]:
    """Field names that are valid where `path` ends, walked through unions by their tags."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in path[:-1]:
        inner: list[type[BaseModel]] = []
        for model in models:
            if isinstance(part, str) and part in model.model_fields:
                inner += _models_in(model.model_fields[part].annotation)
        models = inner or models
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _models_in(argument)]
