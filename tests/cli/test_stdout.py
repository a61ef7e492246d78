"""stdout carries results only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEEPSPEED = """
import logging, sys
logger = logging.getLogger("DeepSpeed")
logger.addHandler(logging.StreamHandler(sys.stdout))
print("imported")
logger.warning("at import")
"""


def test_what_deepspeed_logs_goes_to_stderr(tmp_path: Path) -> None:
    """A package of that name, found as the real one is, and loaded by a command."""
    (tmp_path / "deepspeed.py").write_text(DEEPSPEED)
    script = (
        "from medusa_train.cli.app import make_app\n"
        "app = make_app('x', name='x')\n"
        "@app.command()\n"
        "def one():\n"
        "    import deepspeed\n"
        "    deepspeed.logger.warning('later')\n"
        "    print('result')\n"
        "@app.command()\n"
        "def two(): pass\n"
        "app(['one'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "result\n"
    assert done.stderr == "imported\nat import\nlater\n"
