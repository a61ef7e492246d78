"""`medusa-train run`: what is refused before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_validate import outcome


def test_files_that_are_not_there(tmp_path: Path):
    (tmp_path / "x.yaml").write_text(
        "base_model: {name_or_path: m}\ndata:\n  path: rows.jsonl\n  chat_template: t.jinja\n"
    )
    assert outcome("medusa-train", "run", "x.yaml", cwd=tmp_path) == (
        2,
        "",
        "error: x.yaml:3: data.path: no such file; looked for 'rows.jsonl'\n"
        "error: x.yaml:4: data.chat_template: no such file; looked for 't.jinja'\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_mistakes_in_the_recipe(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("base_model: {name_or_path: m}\ndata: {path: x.yaml}\n")
    assert outcome("medusa-train", "run", "x.yaml", "--set", "heads.num_heads=0", cwd=tmp_path) == (
        2,
        "",
        "error: --set heads.num_heads=0: heads.num_heads: must be at least 1; got 0\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]
