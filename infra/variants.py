"""Variants: one of several configuration classes, chosen by `kind`, or a class of the user's own, named by `target`.

A variant is its class. Its fields are its settings, its class variables and methods say what it needs and what it does
not go with, and `implementation` names the code that does it. Whoever uses a variant asks it, and never what it is: so
built-ins and users' own go the same way.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from pydantic import Field, GetCoreSchemaHandler, JsonValue, SerializationInfo, ValidationError
from pydantic_core import CoreSchema, core_schema

from infra.config import Settings
from infra.errors import BadInput
from infra.plugins import check_function, find_target
from infra.validation_errors import explain

V = TypeVar("V", bound="Variant")


class Variant(Settings):
    """What all variants share."""

    implementation: ClassVar[str]
    """`pkg.mod:name` of the code that does it; imported only where it is used."""

    @property
    def known_as(self) -> str:
        """What messages call it: its kind, or the import string of a class that a user brought."""
        return getattr(self, "kind", None) or _import_string(type(self))

    def ships_with(self, package: str) -> bool:
        """Whether class and implementation are both of a top-level package, whose tests have seen that they fit."""
        return all(name.startswith(f"{package}.") for name in (type(self).__module__, self.implementation))


class Target(Settings):
    """A class of your own, made with options."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Values of the fields of the class."""

    def made(self, base: type[V], options: object) -> V:
        """Import the class and make an object of it from its options as they were read.

        Raises BadInput with the nearest name.
        """
        where = f"target {self.target!r}"
        found = find_target(self.target, where=where)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise BadInput(f"{where}: expected a subclass of {_import_string(base)}, found {found!r}")
        for name in sorted(found.__class_vars__):
            if not hasattr(found, name):
                raise BadInput(f"{where}: expected the class variable {name}, found none")
        try:
            return found.model_validate(options)
        except ValidationError as error:
            raise BadInput(f"options of {where}: {explain(error, found)}") from error


@dataclass(frozen=True)
class OneOf:
    """Marks a base class, in `Annotated`, as standing for these variants of it.

    The last one is a `Target`, by which any other subclass is read and written.
    """

    variants: tuple[type[Settings], ...]

    def __get_pydantic_core_schema__(self, base: type[Variant], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate as a union told apart by `kind`, and make of a target what it names."""
        union = handler.generate_schema(Annotated[Union[self.variants], Field(discriminator="kind")])  # noqa: UP007

        def validated(value: object, read: Callable[[object], Settings]) -> Settings:
            if isinstance(value, base):
                return value
            found = read(value)
            if not isinstance(found, Target):
                return found
            options = value.get("options", {}) if isinstance(value, Mapping) else found.options
            return found.made(base, options)

        def written(value: Variant, write: Callable[[Settings], Any], info: SerializationInfo) -> Any:  # noqa: ANN401
            if type(value) in self.variants:
                return write(value)
            options = value.model_dump(mode="json", exclude_defaults=info.exclude_defaults, context=info.context)
            return write(self.variants[-1](target=_import_string(type(value)), options=options))  # type: ignore[call-arg]

        return core_schema.no_info_wrap_validator_function(
            validated,
            union,
            serialization=core_schema.wrap_serializer_function_ser_schema(written, schema=union, info_arg=True),
        )


def implementation_of(variant: Variant) -> object:
    """Import what a variant names as its implementation."""
    return find_target(variant.implementation, where=f"{variant.known_as!r}")


def check_implementation(variant: Variant, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless a variant's implementation can be imported and called with these parameters."""
    place = f"{where} {variant.known_as!r}: implementation {variant.implementation!r}"
    check_function(variant.implementation, *parameters, where=place, named=named)


def _import_string(found: type) -> str:
    return f"{found.__module__}:{found.__qualname__}"
