"""``medusa-train push`` and ``export --push-to-hub`` against a local stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.decoding_for_tests import save_heads_directory
from tests.hub_for_tests import COMMIT, Hub, Repository
from tests.models_for_tests import save_base

TOKEN = "hf_never" + "x" * 26
REPO = "someone/heads"


def run_at(
    *arguments: object, hub: Hub | str, token: str | None = TOKEN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command, in a process that knows no other hub; nothing that it says has the token."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    home = str(environment.pop("home", "/nonexistent"))
    own |= {"HF_ENDPOINT": hub if isinstance(hub, str) else hub.url, "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HOME": home, **({} if token is None else {"HF_TOKEN": token}), **environment}
    result = subprocess.run(
        [sys.executable, "-m", "medusa_train.cli.train", *map(str, arguments)],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    if token is not None:
        assert token not in result.stdout + result.stderr
    return result


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A directory with what is sent and what is not."""
    directory = tmp_path / "heads"
    (directory / "plots").mkdir(parents=True)
    (directory / ".cache").mkdir()
    for name in (
        "medusa_lm_head.safetensors", "README.md", "plots/one.png", "config.json",
        ".cache/secret", ".env", "medusa_lm_head.pt",
    ):  # fmt: skip
        (directory / name).write_bytes(f"content of {name}".encode() * 40)
    return directory


SENT = ["README.md", "config.json", "medusa_lm_head.safetensors", "plots/one.png"]


def test_exactly_the_files_that_are_listed(heads: Path) -> None:
    with Hub(TOKEN) as hub:
        dry = run_at("push", heads, REPO, "--dry-run", hub=hub)
        assert (dry.returncode, hub.requests) == (0, [])
        result = run_at("push", heads, REPO, hub=hub, HF_DEBUG="1")
        assert result.returncode == 0, result.stderr
        repository = hub.repositories[REPO]
    listed = [line.split()[1] for line in dry.stdout.splitlines()[:-1]]
    assert listed == SENT == sorted(repository.files)
    sizes = [int(line.split()[0].replace(",", "")) for line in dry.stdout.splitlines()[:-1]]
    assert sizes == [len(repository.files[name]) for name in SENT]
    for name, content in repository.files.items():
        assert content == (heads / name).read_bytes()
    assert f"would go to {REPO} (private); nothing was sent" in dry.stdout
    assert repository.private
    assert repository.messages == ["Upload Medusa heads"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert f"sent to {hub.url}/{REPO} (private), commit {COMMIT}" in result.stdout
    assert "not sent: .cache/, .env, medusa_lm_head.pt" in result.stderr


def test_public_and_again(heads: Path) -> None:
    with Hub(TOKEN) as hub:
        first = run_at("push", heads, REPO, "--public", "--json", hub=hub)
        assert first.returncode == 0, first.stderr
        sent = json.loads(first.stdout)
        assert [file["name"] for file in sent["files"]] == SENT
        assert (sent["private"], sent["commit"], sent["dry_run"]) == (False, COMMIT, False)
        assert not hub.repositories[REPO].private
        # Nobody publishes by forgetting an option.
        (heads / "README.md").write_text("changed")
        second = run_at("push", heads, REPO, hub=hub)
        assert second.returncode == 2
        assert second.stderr.splitlines()[-1] == (
            f"error: {REPO}: is there and public, so everyone would see the files; give --public, "
            "or another name"
        )
        assert hub.repositories[REPO].files["README.md"] != b"changed"
        third = run_at("push", heads, REPO, "--public", hub=hub)
        assert third.returncode == 0, third.stderr
        assert hub.repositories[REPO].files["README.md"] == b"changed"


def test_a_private_repository_stays_private(heads: Path) -> None:
    with Hub(TOKEN) as hub:
        hub.repositories[REPO] = Repository(private=True)
        result = run_at("push", heads, REPO, "--public", hub=hub)
        assert hub.repositories[REPO].private
    assert result.returncode == 0, result.stderr
    assert "(private), commit" in result.stdout


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (("POST", "/create", 403, "no"), 2, "the token may not write there (403)"),
        (("POST", "/commit/", 403, "no"), 2, "the token may not write there (403)"),
        (("POST", "/preupload/", 404, "no"), 2, "no such repository for this token (404)"),
        (("POST", "/commit/", 400, f"bad {TOKEN}"), 1, "the hub answered 400: bad …"),
        (("POST", "/create", 500, "on\nfire"), 1, "the hub answered 500: on fire"),
        (("PUT", "/large/", 400, "no"), 1, "Error while uploading"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    heads: Path, fault: tuple[str, str, int, str], code: int, message: str
) -> None:
    method, part, status, reason = fault
    with Hub(TOKEN, faults={(method, part): (status, reason)}) as hub:
        result = run_at("push", heads, REPO, hub=hub)
    assert result.returncode == code
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: {REPO}: ")
    assert message in last
    assert "Traceback" not in result.stderr
    assert not hub.repositories.get(REPO, Repository(private=True)).files


def test_a_wrong_token(heads: Path) -> None:
    with Hub("another") as hub:
        result = run_at("push", heads, REPO, hub=hub)
    assert (result.returncode, hub.repositories) == (2, {})
    assert "the hub does not accept the token (401)" in result.stderr


def test_no_token_and_the_stored_login(heads: Path, tmp_path: Path) -> None:
    with Hub(TOKEN) as hub:
        result = run_at("push", heads, REPO, hub=hub, token=None)
        assert (result.returncode, hub.requests) == (2, [])
        assert "there is no token for the hub; set HF_TOKEN or run `hf auth login`" in result.stderr
        (tmp_path / "token").write_text(TOKEN)
        stored = run_at("push", heads, REPO, hub=hub, token=None, home=str(tmp_path))
        assert stored.returncode == 0, stored.stderr
    assert TOKEN not in stored.stdout + stored.stderr
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_offline_and_no_network(heads: Path) -> None:
    offline = run_at("push", heads, REPO, hub="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert "nothing can be sent in offline mode; unset HF_HUB_OFFLINE" in offline.stderr
    away = run_at("push", heads, REPO, hub="http://127.0.0.1:9")
    assert away.returncode == 1
    assert away.stderr.splitlines()[-1].startswith(f"error: {REPO}: the files could not be sent: ")


def test_a_file_that_the_hub_leaves_out_is_an_error(heads: Path) -> None:
    with Hub(TOKEN, ignored=frozenset({"plots/one.png"})) as hub:
        result = run_at("push", heads, REPO, hub=hub)
    assert result.returncode == 1
    assert "the hub left out plots/one.png; look at the .gitignore" in result.stderr


def test_links_that_lead_out_are_refused(heads: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("secret")
    for name, target in (("note.txt", tmp_path / "private.txt"), ("folder", tmp_path)):
        (heads / name).symlink_to(target)
        with Hub(TOKEN) as hub:
            result = run_at("push", heads, REPO, hub=hub)
        assert (result.returncode, hub.requests) == (2, [])
        assert f"{name}: is a link that leads out of" in result.stderr
        (heads / name).unlink()


@pytest.mark.parametrize(
    ("repo", "message"),
    [("heads", "give OWNER/NAME"), ("a/b/c", "is no name of a repository: "), ("-a/b", "-a")],
)
def test_names_that_are_none(heads: Path, repo: str, message: str) -> None:
    result = run_at("push", heads, "--dry-run", "--", repo, hub="http://127.0.0.1:9")
    assert result.returncode == 2
    assert message in result.stderr


def test_a_directory_without_heads(tmp_path: Path) -> None:
    result = run_at("push", tmp_path, REPO, hub="http://127.0.0.1:9")
    assert result.returncode == 2
    assert "no weights in it; give a heads directory or what an export wrote" in result.stderr


def test_an_export_is_written_and_sent(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    heads = save_heads_directory(tmp_path / "heads", base=base)
    out = tmp_path / "out" / "export"
    command = ["export", "transformers", heads, out]
    with Hub(TOKEN) as hub:
        dry = run_at(*command, "--push-to-hub", REPO, "--dry-run", hub=hub)
        assert (dry.returncode, hub.requests) == (0, []), dry.stderr
        assert not out.exists()
        # What cannot be sent is found out before the export is made.
        refused = run_at(*command, "--push-to-hub", REPO, hub=hub, token=None)
        assert (refused.returncode, out.exists()) == (2, False)
        result = run_at(*command, "--push-to-hub", REPO, hub=hub)
        assert result.returncode == 0, result.stderr
        repository = hub.repositories[REPO]
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert sorted(repository.files) == written
    assert [line.split()[1] for line in dry.stdout.splitlines()[:-1]] == written
    assert repository.private
    card = repository.files["README.md"].decode()
    assert f"DIRECTORY is what `hf download {REPO}` prints." in card
    assert "library_name: transformers" in card
    assert str(tmp_path) not in card


def test_options_that_need_each_other(tmp_path: Path) -> None:
    result = run_at(
        "export", "transformers", tmp_path, tmp_path / "out", "--public", hub="http://x"
    )
    assert result.returncode == 2
    assert "--public: is for what is sent to the hub; give --push-to-hub with it" in result.stderr
