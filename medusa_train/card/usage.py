"""How exports are used: the text of a card's section."""

from __future__ import annotations

from dataclasses import dataclass

from medusa_train.card.markdown import block
from medusa_train.card.sources import CardSources

UNKNOWN_BASE = "DIRECTORY_OF_THE_BASE_MODEL"
LIBRARY = "medusa-train"


@dataclass(frozen=True, slots=True)
class Use:
    """How the files beside a card are used, where they are no heads directory.

    Attributes:
        text: Markdown.
        library: what loads them, as the hub names it.
        tags: more tags for the hub.
        holds_base: whether the base model is among them.
    """

    text: str
    library: str = LIBRARY
    tags: tuple[str, ...] = ()
    holds_base: bool = False


def base_to_load(sources: CardSources) -> str:
    """The base model as a reader can load it: its id on the hub, where that is known."""
    base, identity = sources.base, sources.identity
    is_path = base.hub_id is None and base.name != identity.name_or_path
    return UNKNOWN_BASE if is_path or sources.is_joint else base.name


def own_decoder(sources: CardSources) -> str:
    """A program for our own decoder, and where others are spoken of."""
    if sources.identity.chat_template_hash is not None:
        made = (
            'messages = [{"role": "user", "content": "Why is the sky blue?"}]\n'
            "inputs = model.tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_tensors="pt"\n)'
        )
    else:
        made = 'inputs = model.tokenizer("Why is the sky blue?", return_tensors="pt")'
    name = base_to_load(sources)
    base = "" if name == sources.identity.name_or_path else f', "{name}"'
    program = (
        "from medusa_train import MedusaModel\n\n"
        f'model = MedusaModel.from_pretrained("DIRECTORY"{base})\n'
        f"{made}\n"
        "ids = model.generate(**inputs.to(model.device), max_new_tokens=200, do_sample=False)\n"
        "print(model.tokenizer.decode(ids[0], skip_special_tokens=True))"
    )
    merged = (
        " and the base model that was trained with them is what `medusa-train merge RUN "
        "DIRECTORY_OF_THE_BASE_MODEL` writes"
    )
    where = merged if sources.is_joint else ""
    return "\n\n".join(
        [
            f"With medusa-train, where DIRECTORY holds these files{where}:",
            block(program, language="python"),
            "`medusa-train export transformers DIRECTORY OUT` writes a directory for transformers "
            "alone, which `model.generate(**inputs, custom_generate=OUT, heads=OUT, "
            "trust_remote_code=True)` runs; `medusa-train export --help` lists the engines that "
            "load Medusa heads.",
        ]
    )
