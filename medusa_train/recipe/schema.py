"""What a recipe may say: the sections, their keys, defaults and limits.

The descriptions here are the text of ``docs/recipes.md``. Conditions that tie keys together, and
the names inside ``train.trainer``, are in :mod:`medusa_train.recipe.checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from medusa_train.limits import MAX_TREE_NODES, MAX_TURNS
from medusa_train.recipe.medusa2 import Medusa2Section
from medusa_train.recipe.quality_block import QualitySection
from medusa_train.recipe.section import (
    Concurrency,
    Count,
    CountOrOff,
    Language,
    NumBootstrap,
    Positive,
    Probability,
    Section,
    Seed,
    Temperature,
    Text,
    Timeout,
)


class BaseModelSection(Section):
    """The language model that gets heads."""

    name_or_path: Text
    """Hub id or local directory."""
    gguf_file: Text | None = None
    """File name inside `name_or_path`, for a model that is stored as GGUF."""
    revision: Text | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base model's weights in memory; `auto` is the type they are stored in."""
    quantization: Literal["8bit", "4bit"] | None = None
    """Keep the layers' weights in 8 or 4 bits (bitsandbytes' LLM.int8 and NF4), the rest in
    `dtype`. Checkpoints that are quantised already (GPTQ, AWQ) need nothing here."""
    attn_implementation: Text | None = None
    """Attention code, such as `sdpa` or `eager`; null lets transformers choose."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint. Only for sources that you trust."""


class HeadsSection(Section):
    """The heads that are trained."""

    num_heads: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of heads K; head n predicts the token n + 1 positions ahead."""
    num_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Residual layers L in each head."""
    layout: Literal["full", "shared"] = "full"
    """`full`: every head has its own output matrix. `shared`: all heads use the base model's."""
    init_from: Text | None = None
    """Heads directory to start from, such as a checkpoint's; null starts from the base model's own
    `lm_head`."""
    vocab_size: Count | None = None
    """Train over the N most frequent target tokens only; null is the whole vocabulary. Others count
    as misses in the accuracy."""


class SourceSection(Section):
    """One source of prompts."""

    source: Literal["model", "file", "dataset", "demo"]
    """`model`: the base model writes them. `file`: text, JSON, JSON Lines or Parquet. `dataset`:
    what `datasets.load_dataset` loads. `demo`: a small set that comes with the package."""
    path: Text | None = None
    """The file; for `dataset` its name on the hub or its directory."""
    name: Text | None = None
    """Configuration of the data set."""
    split: Text = "train"
    """Split of the data set."""
    column: Text | None = None
    """Column of the data set that holds the prompt or the conversation; null finds it."""
    limit: Count | None = None
    """Read this many rows at most; null reads all."""
    weight: Positive = 1.0
    """Share of the prompts, relative to the other sources'."""


class ServerSection(Section):
    """Servers that write the answers: any with OpenAI's completions, the base model in each."""

    urls: Annotated[list[Text], Field(min_length=1)]
    """Base URLs, such as `http://host:8000/v1`. Requests go to the one with the most free slots."""
    model: Text | None = None
    """Name of the model at the servers; null asks them."""
    concurrency: Concurrency = 64
    """Requests at a time to each server."""
    timeout: Timeout = 600.0
    """Seconds after which a request is given up and made again."""
    max_retries: CountOrOff = 6
    """How often one request is made again before its prompt counts as failed."""
    exact_ids: bool = False
    """Refuse servers that take or return text instead of token ids."""
    api_key_env: Text = "OPENAI_API_KEY"
    """Environment variable that holds the key, if there is one; the key itself goes in no file."""
    max_failed: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of prompts that may stay without an answer; more is an error."""


class DistillSection(Section):
    """Self-distillation: the base model writes the answers it is trained on."""

    prompts: Text | None = None
    """File with prompts; null lets the base model write them from its template's user header. Short
    for `sources` with one source."""
    sources: list[SourceSection] = Field(default_factory=list)
    """Several sources, mixed by weight; excludes `prompts`."""
    num_prompts: Count | None = None
    """Number of prompts; required where the model writes prompts, else null is all there are."""
    turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 1
    """Turns of each conversation. A file's later user turns are asked again, each in the context of
    the answers so far; where the model writes the prompts, it writes the later ones too."""
    write_user_turns: bool = False
    """Let the model write the user turns that a file's conversation does not have."""
    system_prompt: Text | None = None
    """System turn before every prompt that has none; null is what the template does by itself."""
    max_prompt_tokens: Count = 512
    """Longest prompt in tokens; longer ones are dropped and counted."""
    prompt_temperature: Temperature = 1.0
    """Temperature at which the base model writes prompts."""
    prompt_top_p: Probability = 1.0
    """Nucleus at which the base model writes prompts."""
    temperature: Temperature = 0.7
    """Temperature of the answers; 0 is greedy."""
    top_p: Probability = 1.0
    """Nucleus of the answers; 1 is off."""
    top_k: CountOrOff = 0
    """Draw answers from the k most likely tokens; 0 is off."""
    max_new_tokens: Count = 512
    """Longest answer in tokens; one that is cut there has no end of turn."""
    batch_size: Count = 64
    """Rows decoded together."""
    block_size: Count = 256
    """Prompts in a block, the unit of resuming: an unfinished block is generated again."""
    seed: Seed = 0
    """Seed of all draws."""
    min_answer_tokens: Count = 1
    """Shorter answers are dropped and counted."""
    drop_cut: bool = False
    """Drop answers that reach `max_new_tokens`."""
    loop_ngram: CountOrOff = 8
    """Length of the n-gram that shows a looping answer; 0 keeps looping answers."""
    loop_repeats: Count = 4
    """An answer in which one n-gram occurs more often than this is dropped and counted."""
    near_duplicate: Probability | None = None
    """Drop prompts that share at least this part of their word triples with an earlier one; null
    drops equal prompts only. Prompts made from one long pattern are all near duplicates."""
    languages: list[Language] = Field(default_factory=list)
    """Keep conversations in these languages only (ISO 639-1, such as `en`); empty keeps all."""
    teacher_top_n: Count | None = None
    """Keep the log-probabilities of the n most likely tokens at every token of the answers."""
    teacher_samples: Count | None = None
    """Keep the log-probabilities of n tokens drawn from the model's own distribution, an unbiased
    picture of it; excludes `teacher_top_n`."""
    server: ServerSection | None = None
    """Let servers write; null writes in this process."""


class ChatSection(Section):
    """How messages become token ids."""

    chat_template: Text | None = None
    """Jinja template, or the path of one; null is the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking: false`."""


class DataSection(ChatSection):
    """Where the training conversations come from: exactly one of `path` and `distill`."""

    path: Text | None = None
    """Conversations to train on: a data set directory, or a ShareGPT, messages or text file."""
    distill: DistillSection | None = None
    """Let the base model write the conversations."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Longest conversation in tokens; the rest is cut off, without an invented end of turn."""
    packing: bool = False
    """With `train.hidden_states: online` or `method: medusa2`, put the conversations of a batch
    side by side into rows of `max_length` instead of padding each. Not for models with a state from
    token to token."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the prompts held out for the accuracy report."""
    strict: bool = False
    """Treat a row that must be repaired or dropped as an error."""


class TrainSection(Section):
    """How the heads are trained."""

    method: Literal["medusa1", "medusa2"] = "medusa1"
    """`medusa1`: the base model stays as it is. `medusa2`: base and heads are trained together."""
    medusa2: Medusa2Section | None = None
    """How base and heads are trained together; null is the section's defaults."""
    head_loss_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of head n's loss is this to the power of n."""
    soft_target_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the loss whose target is the base model's own distribution instead of its token; 0
    is the tokens alone."""
    hidden_states: Literal["cached", "online"] = "cached"
    """`cached`: run the base model once and keep its hidden states. `online`: run it every step, as
    `method: medusa2` always does but for its warm-up."""
    hidden_states_dtype: Literal["bfloat16", "int8"] = "bfloat16"
    """Type of the cached hidden states; `int8`, with a scale for each position, takes half the room
    and costs little accuracy."""
    hidden_states_ram: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """GiB of RAM for cached hidden states, once for all processes of a machine; the rest is read
    from disk as it is needed. Null is three quarters of what is free when training starts."""
    keep_hidden_states: bool = True
    """Keep the cached hidden states after training, for another run on the same data."""
    loss_chunk_size: Count | None = None
    """Positions whose logits are in memory at a time; null chooses."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the heads' matrix products; their weights are float32 in any case."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `transformers.TrainingArguments`, by their own names."""

    @property
    def joint(self) -> Medusa2Section | None:
        """How base and heads are trained together; None where the base stays as it is."""
        return (self.medusa2 or Medusa2Section()) if self.method == "medusa2" else None


class TreeSection(Section):
    """The candidate tree, searched on a part of the held-out conversations."""

    num_nodes: Annotated[int, Field(ge=1, le=MAX_TREE_NODES)] = 63
    """Most nodes, without the root. A small device checks fewer at a time: try 16 on a CPU."""
    max_depth: Count | None = None
    """Use the first so many heads; null is all of them."""
    per_depth: list[Count] = Field(default_factory=list)
    """Most nodes at depths 1, 2, …; depths beyond the list are not limited."""
    top_k: Count | None = None
    """Candidates of each head; null is `evaluate.top_k`."""
    search_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the held-out conversations that is searched; the figures are of the others."""
    for_this_device: bool = False
    """Measure how long steps of 1 to `num_nodes` + 1 tokens take on this device, and choose the
    size with the most tokens per second instead of the most per step."""


class EvaluateSection(Section):
    """What the accuracy report holds, which tree is found, and whether the base is compared."""

    top_k: Annotated[int, Field(ge=1, le=100)] = 10
    """Ranks reported for each head."""
    num_bootstrap: NumBootstrap = 1000
    """Resamples of the conversations for the intervals."""
    seed: Seed = 0
    """Seed of the resampling."""
    tree: TreeSection | None = None
    """Find the best candidate tree; null leaves the stage out."""
    quality: QualitySection | None = None
    """Compare the base model that training has changed with the original; null leaves the stage
    out."""


ExportTarget = Literal[
    "fasterdecoding", "tgi", "vllm", "tensorrt-llm", "mlc", "nxd", "combined", "transformers"
]


class ExportSection(Section):
    """The forms for engines that a run writes, each to `exports/` and its target's name."""

    targets: list[ExportTarget] = Field(default_factory=list)
    """The engines; empty leaves the stage out."""
    layout: Literal["full", "shared"] | None = None
    """`full` copies the base's `lm_head` into each head, `shared` leaves equal copies away; null
    writes them as trained."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; `auto` is that of the heads."""
    num_heads: Count | None = None
    """Keep the first N heads; null keeps all."""
    num_speculative_tokens: Count | None = None
    """Length of the chain, for engines without trees; null is all heads."""
    min_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+")] | None = None
    """Oldest version of vLLM that has to load the export, in quotes, such as `"0.25"`; null is
    every version up to 0.32."""
    push_to_hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """Repository of the hub, `OWNER/NAME`, that the export goes to; of several targets each goes to
    `OWNER/NAME-TARGET`. The token is that of `HF_TOKEN` or of the stored login. Null sends none."""
    public: bool = False
    """Make the repository public, and allow one that is; otherwise it has to be private."""


class TrackingSection(Section):
    """Where the curves go besides `metrics.jsonl`."""

    wandb: bool = False
    """Log to Weights & Biases; `WANDB_MODE=offline` needs no account."""
    mlflow: bool = False
    """Log to MLflow: to `MLFLOW_TRACKING_URI`, else to `mlflow.db` in the run directory."""
    tensorboard: bool = False
    """Log for TensorBoard: to `TENSORBOARD_LOGGING_DIR`, else to `tensorboard/` in the run
    directory."""
    project: Text | None = None
    """Project of Weights & Biases and experiment of MLflow; null is `medusa-train`."""
    run_name: Text | None = None
    """Name of the run; null is the recipe's."""


class CardSection(Section):
    """What the model card of the heads says that no file tells."""

    base_model_id: Text | None = None
    """Id of the base model on the hub, where `base_model.name_or_path` is a directory."""
    license: Text | None = None
    """Licence of the base model as the hub abbreviates it, such as `apache-2.0`; null takes what
    the base model's own card says, and if that is not known the card says none."""
    languages: list[Language] = Field(default_factory=list)
    """Languages of the text (ISO 639-1, such as `en`); empty takes those of
    `data.distill.languages`, else what the base model's own card says."""


class Recipe(Section):
    """All that one run needs to know."""

    base_model: BaseModelSection
    """The language model that gets heads."""
    heads: HeadsSection = HeadsSection()
    """The heads that are trained."""
    data: DataSection
    """Where the training conversations come from."""
    train: TrainSection = TrainSection()
    """How the heads are trained."""
    deepspeed: Text | dict[str, Any] | None = None
    """DeepSpeed configuration or the JSON file that holds one, such as
    `recipes/deepspeed/zero2.json`; null trains without DeepSpeed."""
    evaluate: EvaluateSection = EvaluateSection()
    """What the accuracy report holds, which tree is found, and whether the base is compared."""
    export: ExportSection = ExportSection()
    """The forms for engines that are written."""
    card: CardSection = CardSection()
    """What the model card of the heads says that no file tells."""
    tracking: TrackingSection = TrackingSection()
    """Where the curves go besides `metrics.jsonl`."""
    run_dir: Text | None = None
    """Directory of all results; null is `runs/` and the recipe's file name."""


class DistillDataSection(ChatSection):
    """The conversations to generate."""

    distill: DistillSection
    """How the base model writes them."""


class DistillConfig(Section):
    """What `medusa-distill generate` reads: a recipe's generation and nothing else."""

    base_model: BaseModelSection
    """The language model that writes."""
    data: DistillDataSection
    """The conversations to generate."""
