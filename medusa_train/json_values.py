"""JSON files and hashes of JSON values; standard library only, so that an export can ship it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError

FINGERPRINT_LENGTH = 16


def read_json(path: Path) -> Any:
    """Read the JSON file ``path``.

    Raises:
        InputError: the file is missing, cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise InputError(f"{path}: not valid JSON: nested too deeply") from error
    except ValueError as error:  # syntax, encoding, and numbers of thousands of digits
        raise InputError(f"{path}: not valid JSON: {error}") from error


def fingerprint(value: Any) -> str:
    """A short hash of any JSON value; equal values give equal fingerprints in any process."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_LENGTH]
