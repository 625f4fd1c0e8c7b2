"""Variants: alternative configuration classes for a setting. A built-in class is selected by `kind`, a user's class by
`target`.

The fields of a variant are its settings. Its class variables and methods define its requirements and conflicts, and
`implementation` names the code that implements it. Other code only uses these members and never checks for a particular
variant. Therefore built-in and users' variants work in the same way.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, core_schema

from rheostat.infra.config import Settings
from rheostat.infra.demos import FORMER_TARGETS, find_former_name
from rheostat.infra.errors import BadInput
from rheostat.infra.former_names import PACKAGE, former_name
from rheostat.infra.plugins import check_function, find_target, present_target, register_demo
from rheostat.infra.validation_errors import explain


def _register_former_target(target: str) -> str:
    present_target(target)
    return target


ImportString = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), AfterValidator(_register_former_target)]
"""Type of settings that name a user's Python object, as `pkg.mod:name`. A former import string of a part of a
demonstration stays as it is, and the folder of the demonstration is registered."""

V = TypeVar("V", bound="Variant")


class Variant(Settings):
    """Base class of variants: alternative classes for the same setting. Users select a variant with `kind`, or their
    own class with `target`."""

    implementation: ClassVar[str]
    """Import string `pkg.mod:name` of the code that this variant configures. The code is imported only when it is
    needed."""

    @property
    def label(self) -> str:
        """Name of the variant in messages: its kind, or the import string if it is a user's class."""
        return getattr(self, "kind", None) or _import_string(type(self))

    @property
    def known_as(self) -> str:
        """Old name of `label`, which users' variants may still use. Using it prints a deprecation warning."""
        warnings.warn("known_as is deprecated and will be removed. Use label instead.", FutureWarning, stacklevel=2)
        return self.label

    def ships_with(self, package: str) -> bool:
        """Return whether this class and its implementation are both part of Rheostat's package `package`, such as
        "models". The tests of that package then check that they match."""
        prefix = f"{PACKAGE}.{package}."
        return all(name.startswith(prefix) for name in (type(self).__module__, self.implementation))


class Target(Settings):
    """User's own class for a setting, created from options."""

    former_kinds: ClassVar[Mapping[str, str]] = {}
    """Former values of `kind` whose classes are now parts of demonstrations: a table of infra/demos.py."""

    kind: Literal["target"] = "target"
    target: ImportString
    """Import string of the class, `pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Values of the fields of the class."""

    @classmethod
    def build_former(cls, kind: str, base: type[V], options: Mapping[str, object], *, context: object = None) -> V:
        """Create an object of the class that `kind` named formerly, which is now part of a demonstration. See `build`.

        Raises BadInput also if a module of the user hides the module of the demonstration.
        """
        place = cls.former_kinds[kind]
        built = cls(target=register_demo(place)).build(base, options, context=context)
        recorded = find_former_name(type(built), cls.former_kinds)
        if recorded is None or cls.former_kinds[recorded] != place:
            raise BadInput(
                f"kind = {kind!r} names a class in the demonstration {place.partition('/')[0]!r}, but another module "
                f"has the same name: {sys.modules[type(built).__module__].__file__}. Rename that module"
            )
        return built

    def build(self, base: type[V], options: object, *, context: object = None) -> V:
        """Import the class that the user named, and create an object of it from the options. `base` is the required
        base class, and `context` is the validation context of the options.

        Raises BadInput if the class cannot be imported (the message suggests the most similar name), is not a subclass
        of `base`, lacks a class variable, or does not accept the options.
        """
        where = f"target {self.target!r}"
        target_class = find_target(self.target, where=where)
        if not (isinstance(target_class, type) and issubclass(target_class, base)):
            raise BadInput(
                f"{where} must be a subclass of {_import_string(base)}, but it is {target_class!r}. Derive the class "
                "from it"
            )
        for name in sorted(target_class.__class_vars__):
            if not hasattr(target_class, name):
                raise BadInput(f"{where}: the class must define the class variable {name!r}. Add it")
        try:
            return target_class.model_validate(options, context=context)
        except ValidationError as error:
            raise BadInput(f"options of {where}: {explain(error, target_class)}") from error


@dataclass(frozen=True)
class OneOf:
    """Annotation that lists the alternative classes (variants) of a setting, among which users choose with `kind`. The
    last one is a `Target`, which represents any class of the user. If the annotated type is a union, users' classes are
    subclasses of its first member."""

    variants: tuple[type[Settings], ...]

    def __get_pydantic_core_schema__(self, base: type[Variant], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a core schema that selects a variant by `kind`, and that replaces a `Target` by an object of the
        user's class."""
        union = handler.generate_schema(Annotated[Union[self.variants], Field(discriminator="kind")])  # noqa: UP007
        target = self.variants[-1]
        required: type[Variant] = next(iter(get_args(base)), base)
        assert issubclass(target, Target)

        def validated(value: object, read: Callable[[object], Settings], info: ValidationInfo) -> Settings:
            if isinstance(value, base):
                return value
            if isinstance(value, Mapping) and (kind := value.get("kind")) in [*target.former_kinds]:
                options = {name: option for name, option in value.items() if name != "kind"}
                return target.build_former(kind, required, options, context=info.context)
            settings = read(value)
            if not isinstance(settings, Target):
                return settings
            options = value.get("options", {}) if isinstance(value, Mapping) else settings.options
            return settings.build(required, options, context=info.context)

        def written(value: Variant, write: Callable[[Settings], Any], info: SerializationInfo) -> Any:  # noqa: ANN401
            if type(value) in self.variants:
                return write(value)
            options = value.model_dump(mode="json", exclude_defaults=info.exclude_defaults, context=info.context)
            if kind := find_former_name(type(value), target.former_kinds):
                return {"kind": kind, **options}
            name = find_former_name(type(value), FORMER_TARGETS) or former_name(_import_string(type(value)))
            return write(target(target=name, options=options))

        return core_schema.with_info_wrap_validator_function(
            validated,
            union,
            serialization=core_schema.wrap_serializer_function_ser_schema(written, schema=union, info_arg=True),
        )


def implementation_of(variant: Variant) -> object:
    """Import the code that implements a variant, and return it. Raises BadInput if it cannot be imported."""
    return find_target(variant.implementation, where=f"{variant.label!r}")


def check_implementation(variant: Variant, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless the code that implements a variant can be imported and called with these parameters.
    Parameters in `named` are passed by keyword. The message starts with `where`."""
    place = f"{where} {variant.label!r}: implementation {variant.implementation!r}"
    check_function(variant.implementation, *parameters, where=place, named=named)


def _import_string(target_class: type) -> str:
    return f"{target_class.__module__}:{target_class.__qualname__}"
