"""``medusa-eval speedup`` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from medusa_train.cli.evaluate import app
from medusa_train.data.conversations import write_dataset
from medusa_train.evaluate.speed_report import write_speedup
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base
from tests.training_for_tests import conversation

PROMPTS = (
    ("writing", "Name a metal."),
    ("writing", "the rain in the town"),
    ("maths", "two and two"),
)


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["speedup", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def heads(base: Path) -> Path:
    return save_heads_directory(base.parent / "heads", base=base)


@pytest.fixture(scope="module")
def prompts(base: Path) -> Path:
    path = base.parent / "questions.jsonl"
    rows = [{"category": name, "turns": [text, "And then?"]} for name, text in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class _Page(HTMLParser):
    """What a page loads, and its tables' first cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [
            f"{tag} {value}"
            for name, value in attrs
            if name in {"src", "href", "xlink:href"} and value and not value.startswith("#")
        ]


def test_the_report(
    heads: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report"
    code, out, err = _call(
        heads, "--prompts", prompts, "--max-new-tokens", 12, "--dtype", "float32",
        "--dtype", "bfloat16", "--num-probe", 2, "--repeats", 2, "--batch-sizes", "1,3",
        "--num-bootstrap", 50, "--output", output, "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((output / "speedup.json").read_text())
    assert (report["num_prompts"], report["max_new_tokens"]) == (3, 12)
    assert report["prompts"] == "questions.jsonl"
    assert report["tree"] == {"num_nodes": 3, "depth": 3}
    dtype = report["medusa"]["dtype"]
    assert dtype == report["self"]["dtype"]
    assert {row["dtype"] for row in report["dtypes"]} == {"float32", "bfloat16"}
    assert [row["num_prompts"] for row in report["dtypes"]] == [2, 2]
    fastest = max(report["dtypes"], key=lambda row: row["medusa_tokens_per_second"])
    assert fastest["dtype"] == dtype
    equal = report["identical_outputs"]
    assert (equal["dtype"], equal["of"]) == (dtype, 3)
    assert equal["identical"] + equal["ties"] + equal["other"] == 3
    rows = report["per_prompt"]
    assert [row["category"] for row in rows] == ["writing", "writing", "maths"]
    for way in ("baseline", "self", "medusa"):
        tokens = sum(row[way]["num_tokens"] for row in rows)
        assert report[way]["num_tokens"] == tokens
        rate = tokens / sum(row[way]["seconds"] for row in rows)
        assert report[way]["tokens_per_second"] == pytest.approx(rate)
        assert all(0 < row[way]["prefill_seconds"] < row[way]["seconds"] for row in rows)
    assert report["speedup"] == pytest.approx(
        report["medusa"]["tokens_per_second"] / report["baseline"]["tokens_per_second"]
    )
    assert report["speedup_ci95"][0] <= report["speedup"] <= report["speedup_ci95"][1]
    steps = sum(row["medusa"]["num_steps"] for row in rows)
    assert report["acceptance_length"] == report["medusa"]["num_tokens"] / steps
    assert [row["num_prompts"] for row in report["categories"]] == [2, 1]
    assert [row["batch_size"] for row in report["batch_sizes"]] == [1, 3]
    assert {path.name for path in output.iterdir()} == {
        "speedup.json", "speedup.md", "speedup.html", "speed.png", "speed_by_category.png",
        "speed_by_prompt.png", "speed_by_batch_size.png",
    }  # fmt: skip
    page = (output / "speedup.html").read_text(encoding="utf-8")
    assert _Page(page).loaded == []
    for text in (page, (output / "speedup.md").read_text(encoding="utf-8")):
        assert "qual output: " in text
        assert "By category" in text
        assert "atches of 1, 3 were measured; heads stop gaining at" in text


def test_greedy_output_is_equal_in_float32(
    heads: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every dtype on all prompts, each has its own check; here there is one."""
    options = ("--prompts", prompts, "--max-new-tokens", 24, "--dtype", "float32")
    code, out, err = _call(heads, *options, "--num-probe", 0, capsys=capsys)
    assert code == 0, err
    assert "equal output: 3 of 3 answers are identical to plain decoding in float32" in out
    assert "with heads" in out
    code, out, _ = _call(heads, *options, "--num-probe", 0, "--json", capsys=capsys)
    report = json.loads(out)
    [row] = report["dtypes"]
    assert row["identical_outputs"] == report["identical_outputs"]
    assert (report["identical_outputs"]["identical"], row["num_prompts"]) == (3, 3)


# torch's own modules, when torch.compile imports them.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_steps_say_so(
    heads: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _call(
        heads, "--prompts", prompts, "--num-prompts", 1, "--max-new-tokens", 12, "--compile",
        "--dtype", "float32", "--json", capsys=capsys,
    )  # fmt: skip
    report = json.loads(out)
    assert (code, report["compiled"]) == (0, True)
    assert report["identical_outputs"]["identical"] == 1


@pytest.mark.parametrize(("num_heads", "extra_rows"), [(1, 0), (8, 5)])
def test_other_heads_and_bases(
    num_heads: int,
    extra_rows: int,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Case 16: one head and eight; rows of lm_head that are no tokens; a truncated vocabulary."""
    base = save_base(tmp_path / "base", extra_rows=extra_rows)
    heads = save_heads_directory(
        tmp_path / "heads", base=base, num_heads=num_heads, token_map=torch.arange(2, 40, 3)
    )
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps([[0] * (depth + 1) for depth in range(num_heads)] + [[1]]))
    code, out, err = _call(
        heads, "--prompts", prompts, "--max-new-tokens", 10, "--dtype", "float32", "--tree", tree,
        "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report["tree"] == {"num_nodes": num_heads + 1, "depth": num_heads}
    assert report["identical_outputs"]["identical"] == 3


def test_prompts_that_nobody_names(heads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads that lie in no run: the prompts that come with the package, and that is said."""
    options = ("--num-prompts", 2, "--max-new-tokens", 4, "--dtype", "float32", "--json")
    code, out, err = _call(heads, *options, capsys=capsys)
    assert code == 0, err
    assert "prompts: 2, prompts that come with the package\n" in err
    report = json.loads(out)
    assert (report["prompts"], report["num_prompts"]) == ("prompts that come with the package", 2)
    assert report["categories"] == []


def test_prompts_that_the_run_held_out(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    heads = save_heads_directory(run / "heads", base=base)
    rows = []
    for n in range(20):
        asked = conversation([5, 6, 7 + n, 8, 9], [(3, 5)], name=f"row{n}")
        answer = {"role": "assistant", "content": "so"}
        rows.append(replace(asked, messages=(*asked.messages, answer)))
        # A row of the same conversation's second answer: its prompt is no first user turn.
        messages = (*asked.messages, answer, *asked.messages, answer)
        ids = (5, 6, 7 + n, 8, 9, 5, 6, 8)
        later = replace(asked, id=f"later{n}", messages=messages, input_ids=ids)
        rows.append(replace(later, assistant_spans=((7, 8),)))
    write_dataset(run / "data", rows, manifest={"chat_template_hash": None})
    (run / "recipe.resolved.yaml").write_text(
        f"base_model: {{name_or_path: {base}}}\n"
        f"data: {{path: {run / 'data'}, eval_fraction: 0.4}}\nrun_dir: {run}\n"
    )
    options = ("--max-new-tokens", 4, "--dtype", "float32", "--json")
    code, out, err = _call(heads, *options, capsys=capsys)
    assert code == 0, err
    report = json.loads(out)
    assert report["prompts"] == "first user turns that the run held out"
    assert 0 < report["num_prompts"] < 20
    assert f"{2 * report['num_prompts']} held out" in err
    assert {row["prompt_tokens"] for row in report["per_prompt"]} == {3}


def test_what_is_wrong_is_said(
    heads: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: object) -> str:
        code, out, err = _call(*arguments, capsys=capsys)
        assert (code, out) == (2, "")
        return err

    assert "no such heads directory" in error(tmp_path / "none")
    assert error(heads, "--temperature", 0.7).startswith("error: --temperature 0.7: speed is ")
    assert error(heads, "--batch-sizes", "1,x") == (
        "error: --batch-sizes 1,x: must be numbers with commas between, as 1,4,8\n"
    )
    assert "--batch-sizes: a batch of 4 needs as many prompts, got 3" in error(
        heads, "--prompts", prompts, "--batch-sizes", "1,4"
    )
    assert "absent.jsonl: no such file" in error(heads, "--prompts", tmp_path / "absent.jsonl")
    assert "no prompt to measure with: 3 of 3 rows were dropped (no room" in error(
        heads, "--prompts", prompts, "--max-new-tokens", 600
    )
    assert "'--dtype': 'int8' is not one of" in error(heads, "--dtype", "int8")
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    assert "has depth 4, but there are 3 heads" in error(
        heads, "--prompts", prompts, "--tree", tree
    )


def test_unequal_output_is_said_loudly(
    heads: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report with other differences than ties says so in all its forms."""
    options = ("--prompts", prompts, "--max-new-tokens", 6, "--dtype", "float32", "--json")
    _, out, _ = _call(heads, *options, capsys=capsys)
    report = json.loads(out)
    report["identical_outputs"] |= {"identical": 1, "ties": 1, "other": 1}
    write_speedup(report, directory=tmp_path)
    for name in ("speedup.md", "speedup.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "NOT EQUAL: 1 differs elsewhere" in text
        assert "1 differs first where the base" in text
