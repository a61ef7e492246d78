"""``medusa-eval``: measure trained heads."""

from __future__ import annotations

from medusa_train.cli.app import make_app

app = make_app("Measure trained Medusa heads.", name="medusa-eval")


def main() -> None:
    """The console script."""
    app()
