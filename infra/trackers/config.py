"""Configuration of trackers: where the curves of a run are mirrored for people to look at."""

import warnings
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from infra.config import Settings
from infra.errors import BadInput
from infra.variants import OneOf, Target, Variant, check_implementation


class Tracker(Variant):
    """What all trackers share. `implementation` opens one: an `infra.trackers.records.OpenMirror`."""

    package: ClassVar[tuple[str, str] | None] = None
    """Module that it needs, and what pip calls it; none needs nothing that the house does not have."""

    samples: bool = True
    """Whether completions go there, 16 of each iteration with their prompts: they leave the store."""


class TensorBoardTracker(Tracker):
    """Event files of TensorBoard (`pip install 'tensorboardX>=2.6.5,<3'`), in a folder for each run."""

    implementation = "infra.trackers.tensorboard:open_mirror"
    package = ("tensorboardX", "tensorboardX>=2.6.5,<3")

    kind: Literal["tensorboard"] = "tensorboard"
    directory: str = "tensorboard"
    """What `tensorboard --logdir` is given."""


with warnings.catch_warnings():  # `register` is the name of a method of every model's metaclass, too
    warnings.simplefilter("ignore", UserWarning)

    class MlflowTracker(Tracker):
        """A run of MLflow (`pip install 'mlflow-skinny>=3.17,<4'`)."""

        implementation = "infra.trackers.mlflow:open_mirror"
        package = ("mlflow", "mlflow-skinny>=3.17,<4")

        kind: Literal["mlflow"] = "mlflow"
        uri: str | None = None
        """Such as `https://mlflow.example.com`; none takes the variable MLFLOW_TRACKING_URI, or `sqlite:///mlflow.db`.
        User and password are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, a token in
        MLFLOW_TRACKING_TOKEN."""
        experiment: Annotated[str, Field(min_length=1)] = "rheostat"
        """Experiment that the run belongs to."""
        register: Annotated[str, Field(min_length=1)] | None = None
        """Registered model that gets a version for the policy after the last iteration, with the alias `newest`."""

        @field_validator("uri")
        @classmethod
        def _holds_no_password(cls, uri: str | None) -> str | None:
            if uri is not None and urlsplit(uri).password is not None:
                raise ValueError(
                    "expected an address without a password, found one with: set MLFLOW_TRACKING_URI instead"
                )
            return uri


class WandbTracker(Tracker):
    """A run of Weights & Biases (`pip install 'wandb>=0.31,<1'`); the key is in the variable WANDB_API_KEY."""

    implementation = "infra.trackers.wandb:open_mirror"
    package = ("wandb", "wandb>=0.31,<1")

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, Field(min_length=1)] = "rheostat"
    """Project that the run belongs to."""
    entity: str | None = None
    """Team or user whose project it is; none takes the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline` asks no server: `wandb sync` sends what was written."""
    directory: str = "."
    """Where the folder `wandb` lies."""


class TargetTracker(Target):
    """A tracker of your own: a subclass of `infra.trackers.config.Tracker` (docs/tracking.md)."""


TrackerConfig = Annotated[Tracker, OneOf((TensorBoardTracker, MlflowTracker, WandbTracker, TargetTracker))]


class TrackingPart(Settings):
    """Trackers alone, as a command names them."""

    tracking: Annotated[tuple[TrackerConfig, ...], Field(min_length=1)]
    """Where curves are mirrored; a table, or a list of them."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _one_or_several(cls, given: object) -> object:
        return (given,) if isinstance(given, dict) else given


def check_tracker(tracker: Tracker) -> None:
    """Raise BadInput in one line where what a tracker needs is not installed; what is slow to import is not."""
    if tracker.package is not None and find_spec(tracker.package[0]) is None:
        name, wanted = tracker.package
        raise BadInput(
            f"tracking {tracker.known_as!r}: expected the package {name}, found none; pip install '{wanted}'"
        )
    if not tracker.ships_with("infra"):
        check_implementation(tracker, "subject", "settings", where="tracking")
