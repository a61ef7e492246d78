"""``medusa-eval quality`` as a user calls it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.cli.evaluate import app
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import write_dataset
from tests.judge_server import judging
from tests.models_for_tests import save_base
from tests.quality_for_tests import ROWS, merged_by_hand, save_adapters, save_changed
from tests.reference import quality_reference as reference
from tests.training_for_tests import cyclic_rows

PROMPTS = ("Name a metal.", "the rain in the <town> & the sea", "two and two")


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["quality", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def changed(base: Path) -> Path:
    return save_changed(base.parent / "changed", base=base, scale=0.01)


@pytest.fixture(scope="module")
def adapters(base: Path) -> Path:
    return save_adapters(base.parent / "adapters", base=base, scale=0.1)


@pytest.fixture(scope="module")
def data(base: Path) -> Path:
    write_dataset(base.parent / "data", ROWS, manifest={"chat_template_hash": None})
    return base.parent / "data"


@pytest.fixture(scope="module")
def prompts(base: Path) -> Path:
    path = base.parent / "questions.jsonl"
    rows = [{"category": "writing", "turns": [text, "And then?"]} for text in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(directory: Path, *, base: Path) -> Path:
    """A run directory as training leaves it, without heads."""
    answer = {"role": "assistant", "content": "so"}
    rows = [replace(row, messages=(*row.messages, answer)) for row in cyclic_rows(16)]
    write_dataset(directory / "data", rows, manifest={"chat_template_hash": None})
    (directory / "recipe.resolved.yaml").write_text(
        f"base_model: {{name_or_path: {base}}}\n"
        f"data: {{path: {directory / 'data'}, eval_fraction: 0.4}}\nrun_dir: {directory}\n"
    )
    manifest = {"base_fingerprint": base_fingerprint(str(base)), "stages": {}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


class _Page(HTMLParser):
    """What a page loads, its text, and what is marked in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.marked: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [
            f"{tag} {value}"
            for name, value in attrs
            if name in {"src", "href", "xlink:href"} and value and not value.startswith("#")
        ]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "mark" in self._open:
            self.marked.append(data)


def test_figures_are_those_of_a_plain_loop(
    base: Path, changed: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _call(
        "--base-model", base, "--model", changed, "--data", data, "--num-answers", 0,
        "--num-bootstrap", 50, "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    original, other = (
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (base, changed)
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    places = reference.drift(original, other, ROWS, num_tokens=len(tokenizer))
    count = len(places)
    assert report["num_positions"] == count
    assert report["num_conversations"] == len(ROWS)
    assert report["kl"] == pytest.approx(sum(p.kl for p in places) / count, rel=1e-3)
    assert report["greedy_top1_agreement"] == sum(p.agrees for p in places) / count
    moved = sum(p.changed_nll - p.original_nll for p in places) / count
    assert report["perplexity_ratio"] == pytest.approx(float(torch.tensor(moved).exp()), rel=1e-4)
    assert report["kl"] > 0
    assert report["kl_ci95"][0] < report["kl"] < report["kl_ci95"][1]
    assert (report["dtype"], report["text"], report["answers"]) == ("float32", str(data), None)
    assert (report["base_model"], report["changed_model"]) == (str(base), str(changed))


def test_prompts_are_answered_by_both_and_shown(
    base: Path,
    adapters: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The adapters name the original; the text is its own greedy answers."""
    output = tmp_path / "report"
    code, out, err = _call(
        "--model", adapters, "--prompts", prompts, "--num-answers", 2, "--max-new-tokens", 12,
        "--num-bootstrap", 50, "--output", output, "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((output / "quality.json").read_text())
    assert report["text"] == "greedy answers of the original to questions.jsonl"
    assert (report["num_conversations"], report["base_model"]) == (3, str(base))
    assert report["changed_is"] == "adapters"
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = ChatTokenizer(tokenizer, stop_ids=())
    original = AutoModelForCausalLM.from_pretrained(base).eval()
    models = {"original": original, "changed": merged_by_hand(adapters, base=base)}
    rows = report["answers"]["rows"]
    assert [row["question"] for row in rows] == list(PROMPTS[:2])
    for row in rows:
        asked = [{"role": "user", "content": row["question"]}]
        ids = torch.tensor([chat.encode_prompt(asked)])
        written = {}
        for side, model in models.items():
            answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            written[side] = answer.tolist()
            assert row[side] == tokenizer.decode(answer, skip_special_tokens=True)
            assert row[f"{side}_tokens"] == len(written[side])
        same = [a == b for a, b in zip(written["original"], written["changed"], strict=False)]
        assert row["first_difference"] == (same.index(False) if False in same else None)
    assert 0 <= report["answers"]["shared_beginning"] < 1
    names = {"quality.json", "quality.md", "quality.html", "quality_conversations.png"}
    if any(row["num_positions"] >= 20 for row in report["by_place"]):
        names |= {"quality_agreement.png", "quality_kl.png"}
    assert {path.name for path in output.iterdir()} == names
    html = (output / "quality.html").read_text(encoding="utf-8")
    page = _Page(html)
    assert page.loaded == []
    shown = "".join(page.text)
    for row in rows:
        for side in ("original", "changed"):
            assert " ".join(row[side].split()) in " ".join(shown.split())
        assert row["question"] in shown
    assert page.marked
    assert "<town>" not in html
    assert escape(PROMPTS[1]) in html


def test_a_run_has_its_models_and_its_text(
    base: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", base=base)
    shutil.copytree(adapters, run / "adapters")
    options = ("--num-answers", 2, "--max-new-tokens", 6, "--num-bootstrap", 50)
    code, out, err = _call(run, *options, "--json", capsys=capsys)
    assert code == 0, err
    report = json.loads(out)
    assert (report["text"], report["changed_model"]) == (
        "held out by the run", str(run / "adapters"),
    )  # fmt: skip
    assert 0 < report["num_conversations"] < 16
    assert report["answers"]["num_prompts"] == 2
    code, out, err = _call(run, *options, capsys=capsys)
    assert code == 0, err
    assert "Along" not in out
    assert out.splitlines()[-1].split(":")[0] in {"kept", "moved", "not certain"}
    assert f"text: held out by the run; {report['num_conversations']} conversations" in out


def test_a_run_with_a_whole_model_that_has_not_moved(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", base=base)
    shutil.copytree(base, run / "base")
    output = tmp_path / "report"
    code, out, err = _call(
        run, "--num-answers", 3, "--max-new-tokens", 8, "--output", output, capsys=capsys
    )
    assert code == 0, err
    assert "is the original itself, so nothing can have moved" in err
    assert out.splitlines()[-1] == (
        "kept: 100.00 % of the original's greedy choices are retained (95 %: 100.00–100.00 %), "
        "wanted 98.0 %; perplexity × 1.0000 (95 %: 1.0000–1.0000), allowed × 1.02"
    )
    assert "greedy answers: 3 of 3 are the same to the last token; 100.0 % of" in out
    page = _Page((output / "quality.html").read_text(encoding="utf-8"))
    assert page.marked == []
    assert page.text.count("both models") == 3
    markdown = (output / "quality.md").read_text(encoding="utf-8")
    assert "**kept: 100.00 % of the original's greedy choices" in markdown
    assert "| greedy top-1 agreement | 100.00 % | 100.00–100.00 % |" in markdown
    assert {path.stem for path in output.glob("*.png")} == {
        "quality_agreement", "quality_kl", "quality_conversations",
    }  # fmt: skip


def test_limits_decide_the_verdict(
    base: Path, changed: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--base-model", base, "--model", changed, "--data", data, "--num-answers", 0)
    for limits, word in (
        (("--min-agreement", 0, "--max-perplexity-ratio", 9), "kept"),
        (("--min-agreement", 0, "--max-perplexity-ratio", 0.1), "moved"),
    ):
        code, out, err = _call(*options, *limits, "--num-bootstrap", 20, capsys=capsys)
        assert code == 0, err
        assert out.splitlines()[-1].startswith(f"{word}: ")


def test_what_is_wrong_is_said(
    base: Path,
    changed: Path,
    *,
    data: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error(*arguments: object) -> str:
        code, out, err = _call(*arguments, capsys=capsys)
        assert (code, out) == (2, "")
        return err.splitlines()[-1]

    both = ("--base-model", base, "--model", changed)
    assert error() == (
        "error: RUN: give a run directory, or the changed model with --model and its original "
        "with --base-model"
    )
    assert error("--model", changed) == (
        f"error: {changed}: says nothing of the model that it was trained from; give that with "
        "--base-model"
    )
    assert "there is no run that has held out conversations; give some with --data" in error(*both)
    assert "--data and --prompts: give one of them, not both" in error(
        *both, "--data", data, "--prompts", prompts
    )
    assert "--num-prompts: is for --prompts" in error(*both, "--data", data, "--num-prompts", 2)
    assert "absent.jsonl: no such file" in error(*both, "--prompts", tmp_path / "absent.jsonl")
    assert f"{tmp_path}: not a run directory: no recipe.resolved.yaml in it" in error(tmp_path)
    run = _run(tmp_path / "run", base=base)
    assert "has not changed its base model: neither adapters nor base is in it" in error(run)
    other = save_base(tmp_path / "other", seed=4)
    message = error(run, "--model", changed, "--base-model", other)
    assert f"{other}: has the fingerprint {base_fingerprint(str(other))}, but the run began" in (
        message
    )
    assert "no such directory; give a model's" in error(run, "--model", tmp_path / "none")
    nothing = tmp_path / "nothing"
    write_dataset(nothing, [], manifest={"chat_template_hash": None})
    assert f"{nothing}: no conversation with an answer to measure on" in error(
        *both, "--data", nothing
    )


def test_a_judge_reads_the_answers(
    base: Path, changed: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report"
    with judging() as server:
        code, out, err = _call(
            "--base-model", base, "--model", changed, "--prompts", prompts, "--num-answers", 2,
            "--max-new-tokens", 8, "--num-bootstrap", 20, "--output", output, "--json",
            "--judge-url", server.url, "--judge-model", "tiny", capsys=capsys,
        )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((output / "quality.json").read_text())
    judged = report["judge"]
    assert (judged["model"], judged["num_prompts"], judged["failures"]) == ("tiny", 2, {})
    for said, answers in zip(judged["rows"], report["answers"]["rows"], strict=True):
        for side in ("original", "changed"):
            assert said[f"{side}_score"] == len(answers[side].split())
    html = (output / "quality.html").read_text(encoding="utf-8")
    markdown = (output / "quality.md").read_text(encoding="utf-8")
    assert "judge tiny: " in markdown
    for text in (html, markdown):
        assert "Judged by tiny" in text
    assert html.count("the judge gives") == 2


def test_a_judge_is_checked_before_anything_is_loaded(
    base: Path, changed: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--base-model", base, "--model", changed, "--prompts", prompts)
    with judging() as server:
        url = server.url
    for more, message in (
        (("--judge-url", url), "--judge-url and --judge-model: give both, or leave both out"),
        (("--judge-url", url, "--judge-model", "m", "--num-answers", 0), "--judge-url: judges "),
        (("--judge-url", url, "--judge-model", "m"), "--judge-url: no server answers: "),
        (("--judge-url", "x.example", "--judge-model", "m"), "not a base URL of a server"),
    ):
        code, out, err = _call(*options, *more, capsys=capsys)
        assert (code, out) == (2, "")
        assert message in err
        assert "loading" not in err


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_need_lm_eval(
    base: Path, changed: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _call(
        "--base-model", base, "--model", changed, "--data", data, "--lm-eval", "hellaswag",
        capsys=capsys,
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert err == "error: --lm-eval: needs the package lm_eval; pip install lm_eval\n"


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")  # its own, and those of what it imports
def test_tasks_of_lm_eval(
    base: Path, adapters: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task in a file, whose samples are in another: the likelier of two words."""
    samples = tmp_path / "samples.jsonl"
    rows: list[dict[str, Any]] = [{"text": text, "label": n % 2} for n, text in enumerate(PROMPTS)]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tmp_path / "words.yaml"
    task.write_text(
        "task: words\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {samples}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: label\ndoc_to_choice: [sea, river]\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    output = tmp_path / "report"
    options = ("--model", adapters, "--data", data, "--num-answers", 0, "--output", output)
    code, out, err = _call(*options, "--lm-eval", task, "--json", capsys=capsys)
    assert code == 0, err
    [row] = json.loads(out)["lm_eval"]["tasks"]
    assert (row["task"], row["metric"], row["num_samples"]) == ("words", "acc", 3)
    tokenizer = AutoTokenizer.from_pretrained(base)
    original = AutoModelForCausalLM.from_pretrained(base).eval()
    models = {"original": original, "changed": merged_by_hand(adapters, base=base)}
    for side, model in models.items():
        hits = 0
        for sample in rows:
            totals = []
            for word in (" sea", " river"):
                start = len(tokenizer(sample["text"], add_special_tokens=False)["input_ids"])
                ids = tokenizer(
                    sample["text"] + word, add_special_tokens=False, return_tensors="pt"
                )["input_ids"]
                with torch.no_grad():
                    logs = torch.log_softmax(model(ids).logits[0, start - 1 : -1], dim=1)
                totals.append(float(logs.gather(1, ids[0, start:, None]).sum()))
            hits += totals.index(max(totals)) == sample["label"]
        assert row[side] == pytest.approx(hits / 3)
    assert "Tasks of lm-eval" in (output / "quality.html").read_text(encoding="utf-8")
    code, out, err = _call(*options, "--lm-eval", "helaswag", capsys=capsys)
    assert (code, out) == (2, "")
    assert "--lm-eval helaswag: no task of lm_eval and no YAML file; did you mean" in err
