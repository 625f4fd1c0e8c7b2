"""Opening of stores by their addresses, with a table of the kinds of stores in buckets."""

from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rheostat.infra.errors import BadInput
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.local import open_local


def _open_s3(uri: str) -> Store:
    from rheostat.infra.store.s3 import open_s3  # importing the client takes 0.1 s

    return open_s3(uri)


def _open_azure(uri: str) -> Store:
    from rheostat.infra.store.azure import open_azure

    return open_azure(uri)


_BUCKETS: Final[dict[str, Callable[[str], Store]]] = {"s3": _open_s3, "az": _open_azure}
"""Functions that open a store in a bucket, by the scheme of its address."""
URI_FORMS: Final = "write a path, file:///path, s3://bucket/prefix or az://container/prefix"


def is_bucket_address(text: str) -> bool:
    """Return whether a text is the address of a bucket in which runs can be stored."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _BUCKETS


def open_store(uri: str) -> Store:
    """Open the store at a path, at a file:// address, or at the address of a bucket. Nothing is written until the first
    object is put. Raises BadInput if the address is not valid or is a file."""
    if not uri or "::" in uri:
        raise BadInput(f"store {uri!r} is not a valid address: {URI_FORMS}, without '::' chains")
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return open_local(Path(uri).expanduser().resolve())
    if scheme in _BUCKETS:
        return _BUCKETS[scheme](uri)
    parts = urlsplit(uri)
    if scheme != "file":
        raise BadInput(f"store {uri!r} is not a valid address: {URI_FORMS}")
    if parts.netloc not in ("", "localhost"):
        raise BadInput(f"store {uri!r}: a file:// address must not contain a host. Write file:///absolute/path.")
    return open_local(Path(url2pathname(parts.path)).resolve())
