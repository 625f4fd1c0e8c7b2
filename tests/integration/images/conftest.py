"""A policy of every family, built once for a module."""

import diffusers
import pytest

from tests.support.pipelines import BUILT, write


@pytest.fixture(scope="module", params=BUILT)
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
