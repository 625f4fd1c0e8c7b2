"""Bundles that are used on this machine before they are uploaded to a remote store.

The files are in the directories where the store caches its objects. Therefore an upload needs no second copy on disk,
and a process that reads the files is not disturbed by the upload.
"""

import os
import time
from collections.abc import Callable

from rheostat.infra.store.bundles import (
    BundleRef,
    Contents,
    complete_put_bundle,
    describe_stored_files,
    fetch_bundle,
    has_bundle,
    put_bundle_file,
)
from rheostat.infra.store.contracts import Store


def find_readable_store(store: Store, ref: BundleRef) -> Store:
    """Return the store from which a bundle (stored folder) can be read: the given store, or its files on this machine
    if the bundle is not uploaded yet."""
    if store.traits.downloads and not has_bundle(store, ref) and has_bundle(store.staging(), ref):
        return store.staging()
    return store


def upload_staged_bundle(store: Store, ref: BundleRef) -> None:
    """Verify and upload a bundle (stored folder) that was only staged on this machine when an earlier process ended. Do
    nothing if the bundle is uploaded, or is not on this machine."""
    if (staging := find_readable_store(store, ref)) is not store:
        fetch_bundle(staging, ref)
        complete_put_bundle(store, ref, upload_staged_files(store, ref))


def upload_staged_files(
    store: Store, ref: BundleRef, *, share: int = 0, shares: int = 1, on_progress: Callable[[], None] = lambda: None
) -> Contents:
    """Upload files of a bundle that is staged on this machine, and return the list of all its files. The files are
    divided into `shares` parts of which this process uploads one. The caller completes the bundle afterwards.
    `on_progress` is called after each part of a large file."""
    contents = Contents(files=dict(describe_stored_files(store.staging(), ref)))
    waiting = {name: store.staging().local_path(f"{ref.key}/{name}") for name in sorted(contents.files)[share::shares]}

    def report() -> None:
        for path in waiting.values():  # the cache deletes files that were not used for a while
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        on_progress()

    while waiting:
        name = next(iter(waiting))
        put_bundle_file(store, ref, contents, name, waiting[name], on_progress=report)
        del waiting[name]  # its time of modification now describes the uploaded object
        on_progress()
    return contents
