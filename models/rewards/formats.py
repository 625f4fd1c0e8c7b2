"""Rewards that check a completion without comparing it with a reference text: JSON schema, length, repetition and
language."""

import json
import re
from functools import lru_cache
from typing import Any, Final, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import JsonValue
from referencing import Registry

from rheostat.infra.errors import BadInput
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.text_rewards import JsonSchemaReward, LanguageReward, LengthReward, RepetitionReward
from rheostat.models.rewards.packages import require_package
from rheostat.models.rewards.rules import Reward

_CODE_BLOCK: Final = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_CACHED_SCHEMAS: Final = 256
"""Maximum number of validators that a process caches for JSON schemas given in reference answers."""

Validator = Any  # a class that jsonschema generates


def json_schema_reward(config: JsonSchemaReward) -> Reward:
    """Return a reward function whose score is 1 if the completion is a JSON document that conforms to the schema, else
    0. Raises BadInput if the configured `json_schema` is not a valid schema."""
    common = None
    if config.json_schema is not None:
        try:
            common = _build_validator(config.json_schema)
        except ValueError as error:
            raise BadInput(f"reward {config.kind!r}: json_schema: {error}") from None
    read = lru_cache(_CACHED_SCHEMAS)(_read_schema)

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference answer should be a schema but is not."""
        validator = read(answer) if common is None else common
        try:
            document = _parse_json(_find_document(completion))
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(document))

    return reward


def _read_schema(text: str) -> Validator:
    """Return a validator for a JSON schema given as JSON text. Raises ValueError if the text is not a schema."""
    try:
        schema = _parse_json(text)
    except ValueError as error:
        raise ValueError(
            "the reward compares with a JSON schema in the reference answer, but the answer is not a JSON schema: "
            f"{error}"
        ) from None
    return _build_validator(schema)


def _build_validator(schema: JsonValue) -> Validator:
    """Return a validator for a JSON schema. Schemas to which `$ref` points by an address are not downloaded. Raises
    ValueError if the schema is invalid."""
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema must be a JSON object, found {type(schema).__name__} {schema!r:.60}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the JSON schema is not valid at {error.json_path}: {error.message}") from None
    return kind(schema, registry=Registry())


def _find_document(completion: str) -> str:
    """Return the content of the last Markdown code block in a completion, or the whole completion if it has no code
    block."""
    blocks = _CODE_BLOCK.findall(completion)
    return cast(str, blocks[-1]) if blocks else completion


def _parse_json(text: str) -> JsonValue:
    """Parse JSON strictly. NaN, infinity and repeated keys raise ValueError, like other invalid JSON."""

    def build_object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not valid JSON. Only finite numbers are allowed")

    return cast(JsonValue, json.loads(text, object_pairs_hook=build_object, parse_constant=refuse))


def length_reward(config: LengthReward) -> Reward:
    """Return a reward function whose score is 1 if the length of the completion is within the limits. Outside of the
    limits, the score falls linearly and is 0 from the distance `margin` on."""

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 for a length within the limits, else a number from 0 to 1 that falls with the distance."""
        length = _measure(completion, config.unit)
        excess = 0 if config.max_length is None else length - config.max_length
        distance = max(config.min_length - length, excess, 0)
        return max(0.0, 1 - distance / config.margin) if config.margin else float(distance == 0)

    return reward


def _measure(text: str, unit: str) -> int:
    """Return the length of a text in the given unit: words, characters, or lines that are not blank."""
    if unit == "characters":
        return len(text)
    return len(text.split()) if unit == "words" else sum(bool(line.strip()) for line in text.splitlines())


def repetition_reward(config: RepetitionReward) -> Reward:
    """Return a reward function whose score is the share of distinct word n-grams among all word n-grams of the
    completion."""

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return the share of distinct word sequences, from 0 to 1. It is 1 if the completion is too short."""
        words = completion.split()
        sequences = [tuple(words[at : at + config.words]) for at in range(len(words) - config.words + 1)]
        return len(set(sequences)) / len(sequences) if sequences else 1.0

    return reward


def language_reward(config: LanguageReward) -> Reward:
    """Return a reward function whose score is 1 if the completion is written in the configured language, else 0. Raises
    BadInput if py3langid is not installed or does not support the language."""
    require_package("py3langid", "py3langid", f"reward {config.kind!r}")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    known = sorted(str(label) for label in identifier.labels)

    def check(language: str) -> str:
        if language not in known:
            raise ValueError(
                f"the language {language!r:.40} is not known, expected a code such as 'en'{nearest(language, known)}"
            )
        return language

    if config.language is not None:
        try:
            check(config.language)
        except ValueError as error:
            raise BadInput(f"reward {config.kind!r}: language: {error}. Known: {', '.join(known)}") from None

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference answer should be a language but is not."""
        language = check(answer.strip()) if config.language is None else config.language
        if not any(character.isalpha() for character in completion):
            return 0.0
        return float(str(identifier.classify(completion)[0]) == language)

    return reward
