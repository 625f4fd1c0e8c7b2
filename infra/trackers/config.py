"""Configuration of trackers: services such as MLflow, and files, to which the metrics of a run are copied."""

import warnings
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.variants import OneOf, Target, Variant, check_implementation


class Tracker(Variant):
    """Base class of the settings of trackers, which are programs that show metrics, such as TensorBoard.
    `implementation` is the import string of a function of the type `rheostat.infra.trackers.records.OpenMirror`, which
    connects a run to the tracker."""

    checks = {"settings": "rheostat.infra.trackers.config:check_settings"}

    package: ClassVar[tuple[str, str] | None] = None
    """Module that the tracker requires and its pip requirement, such as ("wandb", "wandb>=0.31,<1"). None if no
    additional package is required."""

    samples: bool = True
    """Whether 16 completions per iteration are sent to the tracker, with their prompts. Commands that delete data from
    the store do not delete them there."""


class TensorBoardTracker(Tracker):
    """Tracker that writes event files for TensorBoard, in one folder per run (`pip install
    'tensorboardX>=2.6.5,<3'`)."""

    implementation = "rheostat.infra.trackers.tensorboard:open_mirror"
    package = ("tensorboardX", "tensorboardX>=2.6.5,<3")

    kind: Literal["tensorboard"] = "tensorboard"
    directory: str = "tensorboard"
    """Log directory that is passed to `tensorboard --logdir`."""


with warnings.catch_warnings():  # `register` is also a method of every model's metaclass
    warnings.simplefilter("ignore", UserWarning)

    class MlflowTracker(Tracker):
        """MLflow run with the metrics of the run (`pip install 'mlflow-skinny>=3.17,<4'`)."""

        implementation = "rheostat.infra.trackers.mlflow:open_mirror"
        package = ("mlflow", "mlflow-skinny>=3.17,<4")

        kind: Literal["mlflow"] = "mlflow"
        uri: str | None = None
        """Address of the tracking server, such as `https://mlflow.example.com`. The default is the variable
        MLFLOW_TRACKING_URI, or `sqlite:///mlflow.db`. User and password are read from MLFLOW_TRACKING_USERNAME and
        MLFLOW_TRACKING_PASSWORD, and a token from MLFLOW_TRACKING_TOKEN."""
        experiment: Annotated[str, Field(min_length=1)] = "rheostat"
        """Name of the MLflow experiment that contains the run."""
        register: Annotated[str, Field(min_length=1)] | None = None
        """Name of a registered model. The policy of the last iteration is added to this model as a version with the
        alias `newest`."""

        @field_validator("uri")
        @classmethod
        def _holds_no_password(cls, uri: str | None) -> str | None:
            if uri is not None and urlsplit(uri).password is not None:
                raise ValueError(
                    "the address must not contain a password. Set the address with the password in the environment "
                    "variable MLFLOW_TRACKING_URI instead."
                )
            return uri


class WandbTracker(Tracker):
    """Tracker that copies the metrics of a run to Weights & Biases (`pip install 'wandb>=0.31,<1'`). The API key is
    read from the variable WANDB_API_KEY."""

    implementation = "rheostat.infra.trackers.wandb:open_mirror"
    package = ("wandb", "wandb>=0.31,<1")

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, Field(min_length=1)] = "rheostat"
    """Name of the W&B project that contains the run."""
    entity: str | None = None
    """Team or user that owns the project. The default is the owner of the API key."""
    mode: Literal["online", "offline"] = "online"
    """Mode of the run. With `offline`, data is stored locally until it is sent with `wandb sync`."""
    directory: str = "."
    """Directory in which wandb creates its folder `wandb`."""


class TargetTracker(Target):
    """Tracker defined by the user: a subclass of `rheostat.infra.trackers.config.Tracker` (docs/tracking.md)."""


TrackerConfig = Annotated[Tracker, OneOf((TensorBoardTracker, MlflowTracker, WandbTracker, TargetTracker))]


class TrackingPart(Settings):
    """Table `tracking` of a configuration without the other tables, for commands that only need the trackers."""

    tracking: Annotated[tuple[TrackerConfig, ...], Field(min_length=1)]
    """Trackers to which metrics are copied: one table, or a list of tables."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, dict) else value


def check_settings(tracker: Tracker, facts: object, where: str) -> None:
    """Check a tracker before a run starts, see `check_tracker`."""
    check_tracker(tracker)


def check_tracker(tracker: Tracker) -> None:
    """Raise BadInput if the Python package that a tracker requires is not installed. The package is not imported."""
    if tracker.package is not None and find_spec(tracker.package[0]) is None:
        name, requirement = tracker.package
        raise BadInput(
            f"tracking {tracker.label!r} needs the package {name}. Install it with: pip install '{requirement}'"
        )
    if not tracker.ships_with("infra"):
        check_implementation(tracker, "subject", "settings", where="tracking")
