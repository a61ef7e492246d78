"""Where the curves go besides ``metrics.jsonl``: the Trainer's own trackers."""

from __future__ import annotations

import os
from importlib.util import find_spec

from medusa_train.errors import InputError
from medusa_train.recipe.schema import TrackingSection
from medusa_train.run_dir import RunDir

TRACKERS = ("wandb", "mlflow", "tensorboard")
"""Keys of the section ``tracking``, packages, extras, and the Trainer's names for them."""

DEFAULT_PROJECT = "medusa-train"


def chosen_trackers(section: TrackingSection) -> list[str]:
    """The trackers that a recipe asks for.

    Raises:
        InputError: one of them is not installed.
    """
    chosen = [name for name in TRACKERS if getattr(section, name)]
    for name in chosen:
        if find_spec(name) is None:
            raise InputError(
                f"tracking.{name}: {name} is not installed; "
                f"pip install 'medusa-train[{name}]', or set the key to false"
            )
    return chosen


def set_environment(section: TrackingSection, run: RunDir) -> None:
    """Tell the Trainer's callbacks the project and the place; they read the environment alone.

    The project is the recipe's; a place that the user has set stays.
    """
    project = section.project or DEFAULT_PROJECT
    if section.wandb:
        os.environ["WANDB_PROJECT"] = project
        os.environ.setdefault("WANDB_DIR", str(run.root))
    if section.mlflow:
        os.environ["MLFLOW_EXPERIMENT_NAME"] = project
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{run.root / 'mlflow.db'}")
        # stdout is for results.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    if section.tensorboard:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run.root / "tensorboard"))
