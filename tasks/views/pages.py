"""Pages that show rollouts with their images in a browser, and contact sheets with many generated images.

A page is one file that fetches nothing. Completions are inserted as escaped text, whatever they contain.
"""

import os
import tempfile
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import Run
from rheostat.models.data.images import data_address, thumbnail
from rheostat.models.records.media import ImageSource, ShownImage
from rheostat.models.rollouts.contact_sheet import SheetPicture, SheetRow, contact_sheet
from rheostat.models.rollouts.preview import RolloutPreview
from rheostat.tasks.run.batch import rollouts_of
from rheostat.tasks.views.runs import media_of

SHOWN_BY_BROWSERS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
COLUMNS: Final = 8
SIDE: Final = 128
"""Number of images per row of a contact sheet, and side length of each image in pixels."""
MAX_IMAGES: Final = 1000
"""Maximum number of images on a contact sheet, which then has about 20 million pixels."""
_HEAD: Final = """\
<!doctype html>
<html><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
img {{ max-height: 16rem; min-height: 6rem; margin-right: 0.5rem; image-rendering: pixelated; }}
pre {{ white-space: pre-wrap; background: #f4f4f4; padding: 0.75rem; }}
</style></head><body>
<h1>{title}</h1>
"""


def open_rollouts(run: Run, samples: Sequence[RolloutPreview]) -> Path:
    """Show completions in the browser. They are written to a temporary HTML file that only the user may read; return
    its path."""
    descriptor, name = tempfile.mkstemp(prefix=f"rheostat-{run.name}-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(rollouts_page(run.name, samples, _read_images(run, samples)))
    path = Path(name)
    webbrowser.open(path.as_uri())  # without a browser the user still gets the path
    return path


def rollouts_page(run: str, samples: Sequence[RolloutPreview], images: ImageSource) -> str:
    """Return the HTML page of some completions, each below the images of its prompt."""
    return _HEAD.format(title=escape(f"Rollouts of {run}")) + "".join(_sample_section(each, images) for each in samples)


def write_sheet(run: Run, samples: Sequence[RolloutPreview], target: Path) -> None:
    """Write the last image of each completion to a new PNG file, grouped by prompt in order of appearance.

    Raises BadInput if the target exists or does not end in .png, if no completion has an image, or if there are more
    than `MAX_IMAGES` images.
    """
    if target.suffix.lower() != ".png":
        raise BadInput(f"--sheet {target} must end with .png, because the images are written as a PNG file.")
    if target.exists():
        raise BadInput(f"--sheet {target} already exists. Choose another file, or delete this one.")
    rows: dict[str, list[RolloutPreview]] = {}
    for sample in samples:
        if sample.images:
            rows.setdefault(sample.prompt_id, []).append(sample)
    num_images = sum(map(len, rows.values()))
    if not num_images:
        raise BadInput(f"--sheet {target}: none of the {len(samples)} rollouts has an image. Remove --sheet.")
    if num_images > MAX_IMAGES:
        raise BadInput(f"--sheet {target}: at most {MAX_IMAGES} images fit, found {num_images}. Lower --limit.")
    images = _read_images(run, samples)
    sheet = contact_sheet([_sheet_row(row, images) for row in rows.values()], columns=COLUMNS, side=SIDE)
    try:
        target.write_bytes(sheet)
    except OSError as error:
        raise BadInput(
            f"--sheet {target} cannot be written: {error.strerror or error}. Choose another file."
        ) from error


def _sheet_row(samples: Sequence[RolloutPreview], images: ImageSource) -> SheetRow:
    pictures = (SheetPicture(images.encoded(each.images[-1].digest), each.reward) for each in samples)
    return SheetRow(samples[0].prompt, tuple(pictures))


def _read_images(run: Run, samples: Sequence[RolloutPreview]) -> ImageSource:
    numbers = sorted({sample.iteration for sample in samples})
    return media_of(run, "train", rollouts=[manifest for number in numbers for manifest in rollouts_of(run, number)])


def _sample_section(sample: RolloutPreview, images: ImageSource) -> str:
    reward = "missing" if sample.reward is None else f"{sample.reward:g}"
    title = f"iteration {sample.iteration}, prompt {sample.prompt_id}, sample {sample.sample}, reward {reward}"
    images_html = "".join(
        f'<img src="{_image_address(each, images)}" alt="{each.digest[:16]}">' for each in sample.images
    )
    return (
        f"<h2>{escape(title)}</h2>\n<p>{images_html}</p>\n"
        f"<pre>{escape(sample.prompt)}<b>{escape(sample.completion)}</b></pre>\n<p>{escape(sample.answer or '')}</p>\n"
    )


def _image_address(image: ShownImage, images: ImageSource) -> str:
    encoded = images.encoded(image.digest)
    return data_address(encoded if image.format in SHOWN_BY_BROWSERS else thumbnail(encoded))
