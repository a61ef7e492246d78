"""``medusa-distill``: let the base model write its own training data, and look at data."""

from __future__ import annotations

from medusa_train.cli.app import make_app

app = make_app("Make and inspect training conversations.", name="medusa-distill")


def main() -> None:
    """The console script."""
    app()
