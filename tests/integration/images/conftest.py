"""A text-to-image policy of every family, built once per module."""

import diffusers
import pytest

from tests.support.pipelines import BUILT, write

FIRST = "sd3"
"""Families that the default suite builds. Each takes seconds."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == FIRST else [pytest.mark.system]) for name in BUILT],
)
def family(request):
    """Name of a family."""
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory):
    """Directory of a policy of the family."""
    return write(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def pipe(directory):
    """Pipeline of diffusers that loads the policy."""
    found = diffusers.DiffusionPipeline.from_pretrained(directory)
    found.set_progress_bar_config(disable=True)
    return found
