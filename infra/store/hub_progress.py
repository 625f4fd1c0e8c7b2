"""Progress bar on the terminal while files of the Hugging Face Hub are downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm


@contextmanager
def show_download(label: str) -> "Iterator[type[tqdm]]":
    """Yield a class of progress bars for `snapshot_download`. It displays one bar with the downloaded bytes, described
    by `label`, and removes the bar at the end of the block.

    By default, the library displays three bars and leaves them open. Later output would then be printed into them. As
    in the library, nothing is displayed if stderr is not a terminal, or if HF_HUB_DISABLE_PROGRESS_BARS is set. When
    models are loaded, the library's bars are disabled together with those of transformers. The block enables them.
    """
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, tqdm

    bars = list[tqdm]()
    is_enabled_here = are_progress_bars_disabled() and not HF_HUB_DISABLE_PROGRESS_BARS
    if is_enabled_here:
        enable_progress_bars()

    class Bar(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            has_file_bytes = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            if not has_file_bytes:
                options["disable"] = True
            super().__init__(*args, **{**options, "desc": label, "leave": False})  # type: ignore[no-untyped-call]
            bars.append(self)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            """Keep the description, which the library replaces at the end."""

    try:
        yield Bar
    finally:
        for bar in bars:
            bar.close()
        if is_enabled_here:
            disable_progress_bars()
