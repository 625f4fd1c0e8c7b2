"""Keys that the flows of deployments find in Prefect: a Secret block says what variables of their process are."""

import os
from typing import Final, cast

from prefect.blocks.system import Secret
from pydantic import JsonValue, TypeAdapter, ValidationError

from infra.errors import BadInput

VARIABLE: Final = "RHEOSTAT_SECRETS"
"""Names of Secret blocks, separated by commas."""
_VALUES = TypeAdapter(dict[str, str])


async def take_secrets() -> None:
    """Set the variables that the named blocks hold, as JSON objects of text; those that are set already stay.

    Raises BadInput where there is no such block, or one with something else in it, which is not repeated.
    """
    for name in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        try:
            block = cast(Secret[str], await Secret.aload(name))
        except ValueError:
            raise BadInput(f"{VARIABLE}: expected a Secret block of Prefect called {name!r}, found none") from None
        value: JsonValue = block.value.get_secret_value()  # one that was written in the UI is text
        try:
            values = _VALUES.validate_json(value) if isinstance(value, str) else _VALUES.validate_python(value)
        except ValidationError:
            raise BadInput(f"{VARIABLE}: expected Secret block {name!r} to be a JSON object of texts by name") from None
        for variable, text in values.items():
            os.environ.setdefault(variable, text)
