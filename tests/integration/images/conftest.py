"""A policy of every family, built once for a module."""

import diffusers
import pytest

from tests.support.pipelines import BUILT, write

FIRST = "sd3"
"""The one that the default suite builds; each takes seconds."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == FIRST else [pytest.mark.system]) for name in BUILT],
)
def family(request):
    """The name of a family."""
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory):
    """A policy of it."""
    return write(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def pipe(directory):
    """What diffusers makes of the policy."""
    found = diffusers.DiffusionPipeline.from_pretrained(directory)
    found.set_progress_bar_config(disable=True)
    return found
