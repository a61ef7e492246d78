"""Recipes: every mistake at once with its line, overrides, files, and the resolved recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_train.errors import InputError, InputErrors
from medusa_train.recipe import schema
from medusa_train.recipe.load import (
    dump_resolved,
    load_distill_config,
    load_recipe,
    read_chat_template,
)
from medusa_train.recipe.quality_block import JudgeSection, QualitySection
from medusa_train.recipe.schema import Recipe

GOOD = """\
base_model:
  name_or_path: some/model
data:
  path: rows.jsonl
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a recipe into an empty working directory; give its relative path."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "x.yaml") -> Path:
        Path(name).write_text(text, encoding="utf-8")
        return Path(name)

    return _write


def lines_of(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(InputErrors) as caught:
        load_recipe(path, overrides)
    return list(caught.value.lines)


def test_defaults(write):
    loaded = load_recipe(write(GOOD, "small.yaml"))
    assert loaded.name == "small"
    assert loaded.run_dir == Path("runs/small")
    assert loaded.recipe.run_dir == "runs/small"
    assert loaded.recipe.heads.num_heads == 5
    assert loaded.recipe.train.head_loss_decay == 0.8


def test_every_mistake_at_once_in_the_order_of_the_lines(write):
    path = write("""\
base_model:
  name_or_path: 5
  dtype: bf16
heads:
  num_head: 4
  num_layers: 9
  num_layers: 1
data:
  distill:
    seed: 012
    temperature: hot
    prompt_temperature: 0
  max_length: 5.5
train:
  trainer:
    evaluation_strategy: epoch
    learning_rate: 1e-4
evaluate:
zebra: 1
tracking: {wandb: yes}
""")
    assert lines_of(path) == [
        "x.yaml:2: base_model.name_or_path: must be text; got 5; put it in quotes",
        "x.yaml:3: base_model.dtype: must be one of auto, float32, bfloat16, float16; got 'bf16'",
        "x.yaml:5: heads.num_head: unknown key; did you mean 'num_heads'?",
        "x.yaml:7: heads.num_layers: the key is here twice, first on line 6; remove one",
        "x.yaml:9: data.distill.num_prompts: missing; where the model writes prompts it says "
        "how many",
        "x.yaml:10: data.distill.seed: 012 could be octal; write 12, or '012' for text",
        "x.yaml:11: data.distill.temperature: must be a number; got 'hot'",
        "x.yaml:12: data.distill.prompt_temperature: must be more than 0; greedy prompts would "
        "all be the same; got 0",
        "x.yaml:13: data.max_length: must be a whole number; got 5.5",
        "x.yaml:16: train.trainer.evaluation_strategy: transformers 5 has no such argument; did "
        "you mean 'eval_strategy'?",
        "x.yaml:18: evaluate: must be a section of keys and values; remove it for the defaults; "
        "got null",
        "x.yaml:19: zebra: unknown key; known keys: base_model, heads, data, train, deepspeed, "
        "evaluate, export, card, tracking, run_dir",
        "x.yaml:20: tracking.wandb: must be true or false; got 'yes'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml: must be sections of keys and values; got nothing"),
        ("- 1", "x.yaml: must be sections of keys and values; got a list"),
        ("heads", "x.yaml: must be sections of keys and values; got 'heads'"),
        ("a: [", "x.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("base_model: {name_or_path: m}", "x.yaml: data: missing; there is no default"),
        ("data: {path: p}", "x.yaml: base_model: missing; there is no default"),
        (
            "base_model: {revision: a}\ndata: {path: p}",
            "x.yaml:1: base_model.name_or_path: missing; there is no default",
        ),
    ],
)
def test_a_file_that_is_no_recipe(write, text, expected):
    assert lines_of(write(text)) == [expected]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("heads.num_heads=0", "heads.num_heads: must be at least 1; got 0"),
        ("heads.num_heads=17", "heads.num_heads: must be at most 16; got 17"),
        (
            "evaluate.seed=4294967296",
            "evaluate.seed: must be at most 4294967295; got 4294967296",
        ),
        ("heads.num_heads=3.0", "heads.num_heads: must be a whole number; got 3.0"),
        ("heads.num_heads=true", "heads.num_heads: must be a whole number; got true"),
        ("heads.num_heads=1_0", "heads.num_heads: must be a whole number; got '1_0'"),
        ("heads.num_heads=", "heads.num_heads: must be a whole number; got null"),
        ("heads.layout=ful", "heads.layout: must be one of full, shared; got 'ful'"),
        ("data.eval_fraction=1", "data.eval_fraction: must be less than 1; got 1"),
        ("data.eval_fraction=1e-1000x", "data.eval_fraction: must be a number; got '1e-1000x'"),
        ("data.strict=1", "data.strict: must be true or false; got 1"),
        ("data.path=''", "data.path: must not be empty; write null to leave it out"),
        (
            "base_model.revision=0123",
            "base_model.revision: 0123 could be octal; write 123, or '0123' for text",
        ),
        (
            "base_model.revision=1234567",
            "base_model.revision: must be text; got 1234567; put it in quotes",
        ),
        (
            "heads=5",
            "heads: must be a section of keys and values; remove it for the defaults; got 5",
        ),
        ("train.trainer=[1]", "train.trainer: must be a section of keys and values; got a list"),
        ("data.path.x=1", "data.path.x: data.path is no section, so nothing in it can be set"),
        ("data.distill.seed=-1", "data.distill.seed: must be at least 0; got -1"),
        ("data.path=[1", "data.path: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("data.zebra=1", "data.zebra: unknown key; known keys: chat_template, "),
        ("data.pth=1", "data.pth: unknown key; did you mean 'path'?"),
        ("a.b.c=1", "a: unknown key; known keys: base_model, "),
    ],
)
def test_an_override_is_checked_like_the_file(write, override, message):
    lines = lines_of(write(GOOD), override)
    assert any(line.startswith(f"--set {override}: {message}") for line in lines), lines


@pytest.mark.parametrize("override", ["heads", "=3", "heads.=3", ".num_heads=3", "", "a..b=1"])
def test_an_override_has_a_key_and_a_value(write, override):
    message = f"--set {override}: must be KEY=VALUE, such as heads.num_heads=3"
    assert lines_of(write(GOOD), override) == [message]


def test_overrides_set_any_key_in_order(write):
    recipe = load_recipe(
        write(GOOD),
        [
            "heads.num_heads=2",
            "heads.num_heads=3",
            "train.trainer.learning_rate=1e-3",
            "train.trainer.optim_target_modules=[a, b]",
            "data.chat_template_kwargs={enable_thinking: false}",
            "data.path=null",
            "data.distill.num_prompts=7",
            "run_dir=out",
            "base_model.name_or_path=a=b",
        ],
    ).recipe
    assert recipe.heads.num_heads == 3
    assert recipe.train.trainer == {"learning_rate": 1e-3, "optim_target_modules": ["a", "b"]}
    assert recipe.data.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.data.path is None
    assert recipe.data.distill is not None
    assert recipe.data.distill.num_prompts == 7
    assert recipe.run_dir == "out"
    assert recipe.base_model.name_or_path == "a=b"


def test_int8_is_for_a_cache(write):
    overrides = ("train.hidden_states=online", "train.hidden_states_dtype=int8")
    [line] = lines_of(write(GOOD), *overrides)
    assert line.endswith("train.hidden_states_dtype: is for hidden_states: cached; remove it")


def test_packing_is_for_online_states(write):
    [line] = lines_of(write(GOOD), "data.packing=true")
    assert line.endswith("data.packing: is for train.hidden_states: online; remove it")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["evaluate.tree={}", "data.eval_fraction=0.0"],
            "evaluate.tree: needs held-out conversations; raise data.eval_fraction, or write null",
        ),
        (
            ["evaluate.tree={top_k: 11}"],
            "evaluate.tree.top_k: must be at most evaluate.top_k, which is 10; got 11",
        ),
        (
            ["heads.num_heads=3", "evaluate.tree.max_depth=4"],
            "evaluate.tree.max_depth: must be at most heads.num_heads, which is 3; got 4",
        ),
        (
            ["export.targets=[vllm, sglang]"],
            "export.targets.1: must be one of fasterdecoding, tgi, vllm, tensorrt-llm, mlc, nxd, "
            "combined, transformers; got 'sglang'",
        ),
        (["export.targets=[tgi, tgi]"], "export.targets: tgi is there twice"),
        (
            ["export.targets=[tgi]", "heads.vocab_size=100"],
            "export.targets: tgi cannot load these heads: their vocabulary is truncated; write "
            "heads.vocab_size: null, or heads.layout: shared for vllm",
        ),
        (
            ["export.targets=[vllm]", "heads.vocab_size=100"],
            "export.targets: vllm cannot load these heads: their vocabulary is truncated; write "
            "heads.vocab_size: null, or heads.layout: shared for vllm",
        ),
        (
            ["export.targets=[mlc]", "heads.layout=shared"],
            "export.targets: mlc cannot load these heads: they share the base's lm_head; write "
            "export.layout: full",
        ),
        (
            ["export.targets=[nxd]", "heads.num_layers=2"],
            "export.targets: nxd cannot load these heads: they have 2 layers each; write "
            "heads.num_layers: 1",
        ),
        (
            ["export={targets: [tgi], num_heads: 6}", "heads.num_heads=5"],
            "export.num_heads: must be at most heads.num_heads, which is 5; got 6",
        ),
        (
            ["export={targets: [vllm], min_version: new}"],
            "export.min_version: must be a version such as 0.25; got 'new'",
        ),
        (
            ["export={targets: [vllm], push_to_hub: heads}"],
            "export.push_to_hub: must be a repository of the hub, OWNER/NAME; got 'heads'",
        ),
        (
            ["export.push_to_hub=someone/heads"],
            "export.push_to_hub: is for an export, and there is none; set export.targets",
        ),
        (
            ["export={targets: [vllm], public: true}"],
            "export.public: is for what is sent to the hub; set export.push_to_hub, or remove it",
        ),
        (["evaluate.tree.num_nodes=0"], "evaluate.tree.num_nodes: must be at least 1; got 0"),
        (
            ["evaluate.tree=true"],
            "evaluate.tree: must be a section of keys and values; remove it for the defaults; "
            "got true",
        ),
    ],
)
def test_a_tree_needs_text_and_heads(write, overrides, message):
    [line] = lines_of(write(GOOD), *overrides)
    assert line.endswith(message)
    assert load_recipe(write(GOOD), ["evaluate.tree={}"]).recipe.evaluate.tree.num_nodes == 63


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["evaluate.quality={}", "data.eval_fraction=0.0"],
            "evaluate.quality: needs held-out conversations or prompts; raise data.eval_fraction, "
            "or set prompts",
        ),
        (
            ["evaluate.quality.num_prompts=4"],
            "evaluate.quality.num_prompts: is for prompts; set them, or remove it",
        ),
        (
            ["evaluate.quality.min_agreement=1.5"],
            "evaluate.quality.min_agreement: must be at most 1; got 1.5",
        ),
        (
            ["evaluate.quality={num_answers: 0, judge: {url: 'http://h/v1', model: m}}"],
            "evaluate.quality.judge: judges answers; set num_answers above 0",
        ),
        (
            ["evaluate.quality.judge={url: 'http://h/v1'}"],
            "evaluate.quality.judge.model: missing; there is no default",
        ),
        (
            ["evaluate.quality.judge={url: host, model: m}"],
            "evaluate.quality.judge.url: must be the base URL of a server, such as "
            "http://host:8000/v1; got 'host'",
        ),
        (
            ["evaluate.quality.judge={url: 'http://me:secret@h/v1', model: m}"],
            "evaluate.quality.judge.url: must have no user or password in it, since the recipe is "
            "kept with the run; put a key into the environment variable that api_key_env names",
        ),
        (
            ["evaluate.quality.judge={url: 'http://h/v1', model: m, api_key: secret}"],
            "evaluate.quality.judge.api_key: unknown key; did you mean 'api_key_env'?",
        ),
        (
            ["evaluate.quality.lm_eval_limit=5"],
            "evaluate.quality.lm_eval_limit: is for lm_eval; name tasks there, or remove it",
        ),
    ],
)
def test_the_quality_of_a_base_needs_text(write, overrides, message):
    joint = ["train.method=medusa2", "train.hidden_states=online"]
    [line] = lines_of(write(GOOD), *overrides, *joint)
    assert line.endswith(message)
    [line] = lines_of(write(GOOD), "evaluate.quality={}")
    assert line.endswith(
        "evaluate.quality: is for train.method: medusa2, which changes the base model; remove it"
    )
    settings = "evaluate.quality={prompts: absent.jsonl, num_prompts: 4}"
    loaded = load_recipe(write(GOOD), [settings, *joint])
    assert loaded.recipe.evaluate.quality.num_answers == 20
    assert "evaluate.quality.prompts: no such file; looked for" in loaded.missing[-1]


def test_tasks_of_lm_eval_are_names_or_files(write, tmp_path):
    joint = ["train.method=medusa2", "train.hidden_states=online"]
    path = write(GOOD)
    directory = tmp_path / "recipes"
    directory.mkdir()
    (directory / "own.yaml").touch()
    moved = path.rename(directory / path.name)
    tasks = "evaluate.quality={lm_eval: [hellaswag, own.yaml, absent.yml], lm_eval_limit: 2}"
    loaded = load_recipe(moved, [tasks, *joint])
    found = str(directory / "own.yaml")
    assert [Path(task).name for task in loaded.recipe.evaluate.quality.lm_eval] == [
        "hellaswag", "own.yaml", "absent.yml",
    ]  # fmt: skip
    assert Path(loaded.recipe.evaluate.quality.lm_eval[1]).samefile(found)
    assert "evaluate.quality.lm_eval.2: no such file; looked for" in loaded.missing[-1]


def test_every_key_can_be_set(write):
    """Setting a key to its own value, section by section and key by key, changes nothing."""
    path = write("base_model: {name_or_path: m}\ndata: {distill: {num_prompts: 3}}")
    recipe = load_recipe(path).recipe

    def overrides(value: object, key: str) -> list[str]:
        if isinstance(value, dict) and value:
            return [o for name, item in value.items() for o in overrides(item, f"{key}.{name}")]
        shown = "null" if value is None else str(value).lower() if value in (True, False) else value
        return [f"{key.removeprefix('.')}={shown}"]

    every = overrides(recipe.model_dump(), "")
    assert len(every) > 40
    assert load_recipe(path, every).recipe == recipe


def test_an_override_replaces_what_was_wrong_in_the_file(write):
    path = write(GOOD + "heads: {num_head: 3}")
    assert lines_of(path)
    assert load_recipe(path, ["heads={num_heads: 3}"]).recipe.heads.num_heads == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("max_length: 9", "x.yaml:2: data: needs one of data.path and data.distill; got neither"),
        (
            "path: a, distill: {prompts: b}",
            "x.yaml:2: data: needs one of data.path and data.distill; got both; set one of them to "
            "null",
        ),
        (
            "distill: {num_prompts: 1, min_answer_tokens: 9, max_new_tokens: 8}",
            "x.yaml:2: data.distill.min_answer_tokens: must be at most max_new_tokens, which is 8; "
            "got 9",
        ),
        (
            "max_length: 512, distill: {num_prompts: 1}",
            "x.yaml:2: data.distill.max_prompt_tokens: must be less than data.max_length, which is "
            "512; got 512",
        ),
    ],
)
def test_keys_that_belong_together(write, data, message):
    assert lines_of(write(f"base_model: {{name_or_path: m}}\ndata: {{{data}}}")) == [message]


def test_files_are_looked_up_here_and_then_beside_the_recipe(write):
    Path("recipes/templates").mkdir(parents=True)
    Path("recipes/templates/t.jinja").write_text("{{ x }}", encoding="utf-8")
    Path("recipes/rows.jsonl").write_text("beside", encoding="utf-8")
    path = write(GOOD + "  chat_template: templates/t.jinja", "recipes/x.yaml")

    loaded = load_recipe(path)
    assert loaded.recipe.data.path == "recipes/rows.jsonl"
    assert loaded.recipe.data.chat_template == "recipes/templates/t.jinja"
    assert loaded.chat_template() == "{{ x }}"
    assert loaded.missing == ()

    Path("rows.jsonl").write_text("here", encoding="utf-8")
    assert load_recipe(path).recipe.data.path == "rows.jsonl"


def test_a_file_that_is_not_there_stops_a_run_but_not_a_check(write):
    Path("recipes").mkdir()
    loaded = load_recipe(write(GOOD, "recipes/x.yaml"), ["data.chat_template=/no/t.jinja"])
    with pytest.raises(InputErrors) as caught:
        loaded.require_files()
    assert list(caught.value.lines) == [
        "recipes/x.yaml:4: data.path: no such file; looked for 'rows.jsonl' and "
        "'recipes/rows.jsonl'",
        "--set data.chat_template=/no/t.jinja: data.chat_template: no such file; looked for "
        "'/no/t.jinja'",
    ]


def test_a_template_may_be_the_text_itself(write):
    loaded = load_recipe(write(GOOD + "  chat_template: '{{ messages }}'"))
    assert loaded.chat_template() == "{{ messages }}"
    assert len(loaded.missing) == 1  # the data, not the template
    assert read_chat_template(None) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "x.yaml: no such file"),
        (lambda path: path.mkdir(), "x.yaml: cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "x.yaml: is not UTF-8 text"),
        (
            lambda path: path.write_text("a: " + "[" * 5000),
            "x.yaml: not valid YAML: nested too deeply",
        ),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    make(Path("x.yaml"))
    with pytest.raises(InputError) as caught:
        load_recipe(Path("x.yaml"))
    assert list(caught.value.lines) == [message]


def test_the_resolved_recipe_loads_as_the_same_recipe(write):
    overrides = [
        "train.trainer={eval_strategy: no, learning_rate: 1e-5}",
        "base_model.revision='012'",
    ]
    loaded = load_recipe(write(GOOD), overrides)
    again = load_recipe(write(dump_resolved(loaded.recipe), "recipe.resolved.yaml"))
    assert again.recipe == loaded.recipe
    assert again.run_dir == loaded.run_dir


def test_a_generation_config_is_two_sections_and_nothing_else(write):
    path = write("base_model: {name_or_path: m}\ndata: {distill: {num_prompts: 3}}")
    config = load_distill_config(path).config
    assert config.data.distill.num_prompts == 3
    assert load_distill_config(
        None, ["base_model.name_or_path=m", "data.distill.num_prompts=3"]
    ) == (load_distill_config(None, ["data.distill.num_prompts=3", "base_model.name_or_path=m"]))
    with pytest.raises(InputErrors) as caught:
        load_distill_config(path, ["heads.num_heads=3", "data.path=x"])
    assert [line.split(": ")[2:] for line in caught.value.lines] == [
        ["unknown key; known keys", "base_model, data"],
        ["unknown key; known keys", "chat_template, chat_template_kwargs, distill"],
    ]


@pytest.mark.parametrize(
    "section",
    [
        Recipe,
        schema.BaseModelSection,
        schema.HeadsSection,
        schema.DataSection,
        schema.DistillSection,
        schema.TrainSection,
        schema.EvaluateSection,
        schema.TreeSection,
        QualitySection,
        JudgeSection,
        schema.TrackingSection,
        schema.DistillConfig,
    ],
)
def test_every_field_is_described(section):
    assert [name for name, field in section.model_fields.items() if not field.description] == []
