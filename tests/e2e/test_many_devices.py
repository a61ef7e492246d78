"""Two processes on the CPU give the heads of one: plain, and DeepSpeed in all its stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.hidden_states.cache import STATES
from tests.e2e.processes import start
from tests.models_for_tests import save_base
from tests.training_for_tests import conversation, cyclic_rows, write_recipe

CONFIGS = Path(__file__).parents[2] / "recipes" / "deepspeed"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.json"))
STEPS = 6
# Offload to the CPU and to a disk need compiled operators of DeepSpeed; these compile or say why.
RUNS = {
    "plain": [],
    "online": ["train.hidden_states=online"],
    "online, sharded base": ["train.hidden_states=online", f"deepspeed={CONFIGS}/zero3.json"],
    "soft targets": ["train.soft_target_weight=0.5", f"deepspeed={CONFIGS}/zero3.json"],
    **{name: [f"deepspeed={CONFIGS}/{name}.json"] for name in SHIPPED if name != "zero3_nvme"},
}
SAME_AS = {"online": "online", "online, sharded base": "online", "soft targets": "soft targets"}
BASELINES = {
    "one": [],
    "online": ["train.hidden_states=online"],
    "soft targets": ["train.soft_target_weight=0.5"],
}


def _recipe(directory: Path) -> Path:
    """Forty rows on a tiny base; the data set has a whole number of batches of eight."""
    base = save_base(directory / "base")
    rows = cyclic_rows(40)
    # Rows without a valid pair: one of two processes has a batch of them alone (all four).
    rows[3:7] = [conversation(range(40), [(39, 40)], name=f"short {n}") for n in range(4)]
    overrides = ["data.eval_fraction=0.0", f"train.trainer.max_steps={STEPS}"]
    loaded = write_recipe(directory, base=base, rows=rows, overrides=overrides)
    text = (directory / "recipe.yaml").read_text(encoding="utf-8")
    text = text.replace("eval_fraction: 0.25", "eval_fraction: 0.0").replace(
        "    use_cpu: true\n", ""
    )
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
    assert loaded.recipe.data.eval_fraction == 0.0
    return directory / "recipe.yaml"


def _overrides(directory: Path, name: str, extra: Sequence[str], *, batch: int) -> list[str]:
    return [
        f"run_dir={directory / 'runs' / name}",
        f"train.trainer.max_steps={STEPS}",
        f"train.trainer.per_device_train_batch_size={batch}",
        "train.trainer.train_sampling_strategy=sequential",
        *extra,
    ]


def _run_all(directory: Path, runs: list[list[str]], *, num_processes: int) -> None:
    """Run them in one process, or in several of one job."""
    path = directory / f"runs-{num_processes}.json"
    path.write_text(json.dumps(runs), encoding="utf-8")
    script = str(Path(__file__).with_name("many_runs.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    launcher = launcher if num_processes > 1 else []
    log = directory / f"log-{num_processes}"
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, *launcher, script, str(path)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=Path(__file__).parents[2],
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]


def _environment() -> dict[str, str]:
    here = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": here if path is None else f"{here}{os.pathsep}{path}",
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's directory, after every run on two processes and the baselines on one."""
    directory = tmp_path_factory.mktemp("devices")
    recipe = str(_recipe(directory))
    one = [
        [recipe, *_overrides(directory, f"one {name}", extra, batch=8)]
        for name, extra in BASELINES.items()
    ]
    two = [[recipe, *_overrides(directory, name, more, batch=4)] for name, more in RUNS.items()]
    _run_all(directory, one, num_processes=1)
    _run_all(directory, two, num_processes=2)
    return directory


def _heads(directory: Path, name: str) -> dict[str, Tensor]:
    return load_file(directory / "runs" / name / "heads" / "medusa_lm_head.safetensors")


@pytest.mark.parametrize("name", list(RUNS))
def test_two_processes_give_the_heads_of_one(finished: Path, name: str) -> None:
    ours, theirs = _heads(finished, name), _heads(finished, f"one {SAME_AS.get(name, 'one')}")
    assert {key: value.shape for key, value in ours.items()} == {
        key: value.shape for key, value in theirs.items()
    }
    for key, value in ours.items():
        assert value.numel()
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", list(RUNS))
def test_training_moved_every_head(finished: Path, name: str) -> None:
    for key, value in _heads(finished, name).items():
        if key.endswith("linear.weight"):
            assert value.abs().max() > 1e-4, f"{key} is still zero"


def test_the_same_loss_curve(finished: Path) -> None:
    curves = {}
    for name in ("one one", "plain", *SHIPPED[:2], "zero3"):
        lines = (finished / "runs" / name / "metrics.jsonl").read_text().splitlines()
        curves[name] = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    for name, curve in curves.items():
        assert curve == pytest.approx(curves["one one"], abs=1e-4), name
        assert len(curve) == STEPS


def test_checkpoints_hold_whole_heads(finished: Path) -> None:
    whole = _heads(finished, "zero3")
    last = finished / "runs" / "zero3" / "checkpoints" / f"checkpoint-{STEPS}"
    saved = load_file(last / "medusa_lm_head.safetensors")
    assert saved.keys() == whole.keys()
    for key, value in saved.items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=0)


def test_two_processes_write_the_same_cache(finished: Path) -> None:
    parts = [
        sorted((finished / "runs" / name / "hidden_states" / "train").glob("*.safetensors"))
        for name in ("one one", "plain")
    ]
    assert len(parts[0]) == len(parts[1]) >= 1
    for one, two in zip(*parts, strict=True):
        torch.testing.assert_close(load_file(one)[STATES], load_file(two)[STATES])


def _arguments(directory: Path, name: str, extra: Sequence[str], *, devices: int) -> list[str]:
    overrides = _overrides(directory, name, extra, batch=8 // devices)
    options = [option for override in overrides for option in ("--set", override)]
    return ["run", str(directory / "recipe.yaml"), "--devices", str(devices), *options]


def _begin(
    directory: Path, name: str, extra: Sequence[str], *, devices: int = 2
) -> subprocess.Popen[bytes]:
    arguments = _arguments(directory, name, extra, devices=devices)
    return start("train", arguments, log=directory / "log")


def _steps(directory: Path, name: str) -> int:
    path = directory / "runs" / name / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def _wait_for(process: subprocess.Popen[bytes], directory: Path, name: str, *, step: int) -> None:
    while _steps(directory, name) < step:
        assert process.poll() is None, (directory / "log").read_text()[-6000:]
        time.sleep(0.005)


LONG = [
    "train.trainer.max_steps=60",
    "train.trainer.save_steps=20",
    "train.trainer.logging_steps=1",
]


def test_interrupted_killed_and_other_processes(tmp_path: Path) -> None:
    """One story, since each start takes seconds: SIGTERM, kill -9, a refusal, and the end."""
    _recipe(tmp_path)
    log = tmp_path / "log"
    zero = f"deepspeed={CONFIGS}/zero3.json"
    straight = _begin(tmp_path, "straight", [*LONG, zero])
    assert straight.wait(timeout=300) == 0, log.read_text()[-6000:]

    process = _begin(tmp_path, "cut", [*LONG, zero])
    _wait_for(process, tmp_path, "cut", step=5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    saved = sorted((tmp_path / "runs" / "cut" / "checkpoints").glob("checkpoint-*"))
    assert len(saved) == 1
    assert "interrupted at step" in log.read_text()

    process = _begin(tmp_path, "cut", [*LONG, zero])
    _wait_for(process, tmp_path, "cut", step=30)
    worker = psutil.Process(process.pid).children()[-1]
    worker.send_signal(signal.SIGKILL)
    assert process.wait(timeout=200) == 1
    assert "was ended by SIGKILL" in log.read_text()

    size = log.stat().st_size
    other = _begin(tmp_path, "cut", [*LONG, zero], devices=1)
    assert other.wait(timeout=120) == 2
    # The batch differs too, so it is said at once that this is another training.
    assert "ran here with other settings" in log.read_text()[size:]
    size = log.stat().st_size
    plain = _begin(tmp_path, "cut", LONG)
    assert plain.wait(timeout=120) == 2
    assert (
        "written by 2 processes (DeepSpeed), and this run has 2 (plain)" in log.read_text()[size:]
    )

    process = _begin(tmp_path, "cut", [*LONG, zero])
    assert process.wait(timeout=300) == 0, log.read_text()[-6000:]
    assert _steps(tmp_path, "cut") == 60
    for key, value in _heads(tmp_path, "cut").items():
        torch.testing.assert_close(value, _heads(tmp_path, "straight")[key], rtol=0, atol=0)


def test_nvme_offload_runs_or_says_what_is_missing(tmp_path: Path) -> None:
    _recipe(tmp_path)
    config = json.loads((CONFIGS / "zero3_nvme.json").read_text(encoding="utf-8"))
    for name in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][name]["nvme_path"] = str(tmp_path)
    (tmp_path / "nvme.json").write_text(json.dumps(config), encoding="utf-8")
    process = _begin(tmp_path, "nvme", [f"deepspeed={tmp_path}/nvme.json"])
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible(verbose=False):
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-6000:]
    else:
        assert process.wait(timeout=120) == 2
        errors = (tmp_path / "log").read_text().splitlines()
        assert [line for line in errors if line.startswith("error:")] == [
            "error: deepspeed: offload to nvme needs the library libaio with its headers; install "
            "it (libaio-dev), or offload to the device cpu"
        ]


def test_two_processes_generate_the_bytes_of_one(tmp_path: Path) -> None:
    _recipe(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Question {n}?\n" for n in range(14)), encoding="utf-8")
    section = (
        f"{{prompts: {prompts}, max_prompt_tokens: 64, max_new_tokens: 12, block_size: 4, "
        "batch_size: 4, loop_ngram: 0}"
    )
    written = []
    for devices in (1, 2):
        run = tmp_path / f"run-{devices}"
        options = ["data.path=null", f"data.distill={section}", f"run_dir={run}"]
        arguments = [option for value in options for option in ("--set", value)]
        command = ["run", str(tmp_path / "recipe.yaml"), "--only", "distill", *arguments]
        process = start("train", [*command, "--devices", str(devices)], log=tmp_path / "log")
        assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()[-6000:]
        written.append((run / "data" / "conversations.jsonl").read_bytes())
        assert not list((run / "data").glob("shard-*"))
    assert written[0] == written[1]
