"""Bundles: immutable directories (policies, optimizer state), named by the digest of their table of contents."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.sealed import canonical_json
from infra.storage import Store, check_key

_CONTENTS = "bundle.json"

_verified: set[tuple[str, str]] = set()
"""(store, key) of the bundles whose files this process has checked; they cannot change, so once is enough."""


class BundleRef(Settings):
    """Where a bundle is and what it must be."""

    key: str
    """`<prefix>/<first 16 digits of the digest>`."""
    digest: str
    """BLAKE3 of bundle.json, which names the digest of every file."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of all files together."""


class BundledFile(Settings):
    """One file of a bundle."""

    digest: str
    """BLAKE3 of the file's bytes."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the file."""
