"""Model card (README.md of a Hugging Face model directory) with the training recipe and evaluation results
of a policy."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from pydantic import JsonValue

from rheostat.models.config.promotion import CardConfig
from rheostat.models.records.merges import Merge

CARD: Final = "README.md"

SECTIONS: Final = (
    ("policy", "Initial policy"),
    ("data", "Problems"),
    ("rollout", "Generation"),
    ("scoring", "Rewards"),
    ("algorithm", "Algorithm"),
    ("update", "Update"),
)
"""Sections of a run's configuration that describe the training of a model, with their headings in the card."""


def model_card(
    card: CardConfig,
    *,
    title: str,
    lineage: Mapping[str, str],
    config: Mapping[str, JsonValue],
    evaluations: Sequence[str],
) -> str:
    """Return the text of the model card of a trained policy: YAML front matter for Hugging Face, then Markdown.
    `lineage` and `config` say how the policy was trained."""
    body = "\n".join(_body_lines(card, title, lineage, config, evaluations))
    return _front_matter(card, "reinforcement-learning") + body


def merge_card(card: CardConfig, *, title: str, merge: Merge) -> str:
    """Return the text of the model card of a policy that was merged from other policies."""
    kind = "weighted sum" if merge.is_weighted_sum else f"merge (`{merge.method['kind']}`)"
    lines = [f"# {title}\n", f"The {kind} of these policies, tensor by tensor.\n", "## Parents\n"]
    lines += [f"- {parent.weight:g} × {shorten_path(parent.name)}: `{parent.digest}`" for parent in merge.parents]
    if merge.base is not None:
        lines += [f"- base model {shorten_path(merge.base.name)}: `{merge.base.digest}`"]
    if not merge.is_weighted_sum:
        lines += ["\n## Method\n", *_setting_lines(merge.method, "")]
    if merge.soup is not None:
        lines += ["\n## Soup\n", *_setting_lines(merge.soup, "")]
    return _front_matter(card, "merge") + "\n".join(
        [*lines, f"\nMade by {merge.who}, {merge.when}, with {merge.version}.\n"]
    )


def _front_matter(card: CardConfig, tag: str) -> str:
    """Return the YAML front matter of a card, which Hugging Face's programs read."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=card.base_model,
        license=card.license,
        datasets=[*card.datasets] or None,
        language=[*card.language] or None,
        pipeline_tag="text-generation",
        tags=["rheostat", tag],
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _body_lines(
    card: CardConfig,
    title: str,
    lineage: Mapping[str, str],
    config: Mapping[str, JsonValue],
    evaluations: Sequence[str],
) -> Iterator[str]:
    yield f"# {title}\n"
    if card.description:
        yield f"{card.description}\n"
    yield "## Lineage\n"
    yield from (f"- {name}: `{value}`" for name, value in lineage.items())
    if evaluations:
        yield "\n## Evaluations\n"
        yield from (f"- {each}" for each in evaluations)
    yield "\n## Recipe\n"
    for part, heading in SECTIONS:
        yield f"### {heading}\n"
        yield from _setting_lines(config.get(part), "")
        yield ""


def _setting_lines(value: JsonValue, key: str) -> Iterator[str]:
    """Yield one Markdown line per setting that has a value, with its dotted key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _setting_lines(part, f"{key}.{name}" if key else name)
    elif value not in (None, [], ""):
        yield f"- `{key}` = `{_without_folders(value)}`"


def _without_folders(value: JsonValue) -> JsonValue:
    """Return a value in which absolute paths of this machine are shortened."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return shorten_path(value) if isinstance(value, str) else value


def shorten_path(text: str) -> str:
    """Return the last part of an absolute path, and any other text unchanged.

    A card may be published, so it contains no folders of this machine.

    >>> shorten_path("/srv/data/train.jsonl"), shorten_path("data/train.jsonl")
    ('…/train.jsonl', 'data/train.jsonl')
    """
    path = PurePosixPath(text)
    return f"…/{path.name}" if path.is_absolute() and len(path.parts) > 2 and "\n" not in text else text
