"""Descriptions of the fields of settings classes, which forms and the documentation use."""

from typing import Annotated

from pydantic import Field

from rheostat.infra.config import Settings
from rheostat.infra.field_descriptions import describe_fields


class Base(Settings):
    size: int = 1
    """Number of rows,
    of all shards."""
    share: float = 0.5
    """Share of the rows."""
    rest: Annotated[int, Field(description="What remains.")] = 0
    """Not used, because the field has a description."""


class Derived(Base):
    class Part(Settings):
        name: str
        """Name of a part."""

    share: float = 0.1
    part: Part
    """One part."""


def test_a_field_is_described_by_its_argument_or_its_docstring_which_is_inherited_with_the_field():
    inherited = {"size": "Number of rows,\nof all shards.", "rest": "What remains."}
    assert describe_fields(Base) == inherited | {"share": "Share of the rows."}
    assert describe_fields(Derived) == inherited | {"part": "One part."}, "share is declared again"


def test_a_json_schema_contains_the_descriptions_of_nested_and_local_classes():
    class Local(Settings):
        count: int
        """Number of things."""

    schema = Derived.model_json_schema()
    properties = {name: field.get("description") for name, field in schema["properties"].items()}
    assert properties == {"size": None, "rest": None, "share": None} | describe_fields(Derived)
    assert schema["$defs"]["Part"]["properties"]["name"]["description"] == "Name of a part."
    assert Local.model_json_schema()["properties"]["count"]["description"] == "Number of things."
