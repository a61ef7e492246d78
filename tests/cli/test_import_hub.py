"""``medusa-train import OWNER/NAME``, from a local stand-in for the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa_train.heads.checkpoint import load_heads
from tests.cli.test_push import REPO, TOKEN, run_at
from tests.exports_for_tests import base_directory, export, heads_directory
from tests.hub_for_tests import COMMIT, Hub, Repository

FILES = ("config.json", "model.safetensors", "README.md")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """An export, and beside it what is not fetched."""
    export("vllm", heads_directory(), tmp_path / "export")
    files = {name: (tmp_path / "export" / name).read_bytes() for name in FILES}
    files |= {"base/model.safetensors": b"large", "modeling.py": b"raise SystemExit"}
    # The hub would not have such a name; another server might.
    files["../../../outside.safetensors"] = b"hostile"
    return Repository(private=True, files=files)


def _fetched(hub: Hub) -> set[str]:
    return {
        path.split(f"/resolve/{COMMIT}/")[1]
        for method, path in hub.requests
        if method == "GET" and "/resolve/" in path
    }


def test_heads_come_from_the_hub_and_nothing_else(tmp_path: Path, repository: Repository) -> None:
    with Hub(TOKEN) as hub:
        hub.repositories[REPO] = repository
        home = str(tmp_path / "home")
        result = run_at("import", REPO, tmp_path / "heads", hub=hub, home=home, HF_DEBUG="1")
        assert result.returncode == 0, result.stderr
        assert _fetched(hub) == {"config.json", "model.safetensors"}
        assert hub.tokens == {f"Bearer {TOKEN}"}
        # The cache has them: the second time nothing is fetched, and a commit is one of its states.
        hub.requests.clear()
        again = run_at(
            "import", REPO, tmp_path / "again", "--revision", COMMIT, "--base-model",
            base_directory(), "--file", "model.safetensors", hub=hub, home=home,
        )  # fmt: skip
        assert again.returncode == 0, again.stderr
        assert not _fetched(hub)
    assert f"fetching {REPO} from the hub" in result.stderr
    assert not list(tmp_path.rglob("outside.safetensors"))
    assert not list(tmp_path.rglob("modeling.py"))
    wanted, base = load_heads(heads_directory())
    for name in ("heads", "again"):
        heads, identity = load_heads(tmp_path / name)
        assert identity.fingerprint == base.fingerprint
        for key, tensor in wanted.state_dict().items():
            assert torch.equal(heads.state_dict()[key], tensor)


def test_what_the_hub_does_not_have(tmp_path: Path, repository: Repository) -> None:
    out = tmp_path / "heads"
    with Hub(TOKEN) as hub:
        hub.repositories[REPO] = repository

        def refused(*options: object, token: str | None = TOKEN, **environment: str) -> str:
            command = ["import", *options[:1], out, *options[1:]]
            home = str(tmp_path / "home")
            result = run_at(*command, hub=hub, token=token, home=home, **environment)
            assert result.returncode == 2, result.stderr
            assert "Traceback" not in result.stderr
            return result.stderr.splitlines()[-1]

        nowhere = "no such directory, and the hub has no such repository for this token; check"
        assert refused("someone/other").startswith(f"error: someone/other: {nowhere}")
        assert nowhere in refused(REPO, token=None)
        assert refused(REPO, "--revision", "v2") == (
            f"error: --revision: {REPO} has no v2; give a branch, a tag or a commit"
        )
        offline = refused(REPO, HF_HUB_OFFLINE="1")
        assert "it could not be fetched from the hub: " in offline
        assert "--revision: is for a repository of the hub" in refused(
            tmp_path, "--revision", "main"
        )
        assert f"{tmp_path}/absent: no such directory" in refused(tmp_path / "absent")
        del repository.files["model.safetensors"]
        assert "no heads in it: no weights file" in refused(REPO)
    assert not out.exists()


def test_a_hub_that_cannot_be_reached_or_fails(tmp_path: Path, repository: Repository) -> None:
    out, home = tmp_path / "heads", str(tmp_path / "home")
    away = run_at("import", REPO, out, hub="http://127.0.0.1:9", home=home)
    assert away.returncode == 2
    assert away.stderr.splitlines()[-1].endswith("; check the name and the network")
    fault = {("GET", "/model.safetensors"): (403, f"not for {TOKEN}")}
    with Hub(TOKEN, faults=fault) as hub:
        hub.repositories[REPO] = repository
        result = run_at("import", REPO, out, hub=hub, home=home)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == f"error: {REPO}: the hub answered 403: not for …"
