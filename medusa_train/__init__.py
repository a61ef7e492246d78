"""Train Medusa heads on any Hugging Face causal language model.

The package imports nothing here, so that ``import medusa_train`` and ``--help`` stay fast;
``MedusaModel`` is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_train.medusa_model import MedusaModel as MedusaModel

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "MedusaModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medusa_train.medusa_model import MedusaModel

    return MedusaModel
