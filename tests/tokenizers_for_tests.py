"""Small real tokenizers and chat templates, built from code in milliseconds.

Shared by all tests: ``from tests.tokenizers_for_tests import make_tokenizer, CHATML``.
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from medusa_train.data.chat import ChatTokenizer

BOS, END, EOS, PAD = "<s>", "<|im_end|>", "</s>", "<pad>"
SPECIAL = [BOS, EOS, PAD, "<|im_start|>", END]

# ChatML with BOS in the template.
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ChatML that renders tool calls.
CHATML_TOOLS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '[call]' + (call.function | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# ChatML that removes the reasoning from every answer but the last.
CHATML_THINK = (
    "{{ bos_token }}{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The system turn is part of the first user turn, as in Llama 2.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set loop_messages = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set content = system + message['content'] if loop.first else message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% else %}{{ ' ' + content + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# No system turn at all, as in the first Mistral.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

# Roles as words, in the manner of Vicuna.
VICUNA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# No token of the template stops the model.
PLAIN_ROLES = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)

# The generation prompt ends with a space, which joins the answer's first word.
SPACE_AT_PROMPT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + eos_token }}"
    "{% else %}{{ 'Question: ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)

# The generation prompt opens a reasoning block, which finished answers do not have.
THINK_PROMPT = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "chatml-tools": CHATML_TOOLS,
    "chatml-think": CHATML_THINK,
    "llama2": LLAMA2,
    "mistral": MISTRAL,
    "vicuna": VICUNA,
    "plain-roles": PLAIN_ROLES,
    "space-at-prompt": SPACE_AT_PROMPT,
    "think-prompt": THINK_PROMPT,
}

_SENTENCES = (
    "Name a colour. Teal is a colour between blue and green.",
    "The Danube is a river. What is the weather in Oslo? It is 4 degrees and raining.",
    "USER: Write a short poem about the sea. ASSISTANT: The sea is wide, the sea is blue.",
    "Question: Name a metal. Answer: Zinc is a metal, and neon is a gas.",
    "[INST] You are terse. <<SYS>> <</SYS>> [/INST] Plum. <think> because it is so </think>",
    "### user: Hello there, how are you? ### assistant: I am well, thank you. system tool",
)


def make_tokenizer(
    *,
    template: str | None = CHATML,
    eos: str = END,
    pad: str | None = PAD,
    adds_bos: bool = True,
    metaspace: bool = False,
    vocab_size: int = 600,
) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of at most ``vocab_size`` ids, special tokens first.

    Args:
        template: the chat template; None for a base model without one.
        eos: its end-of-sequence token.
        pad: its padding token; None for a tokenizer without one.
        adds_bos: whether encoding adds BOS in front by itself, as Llama's does.
        metaspace: words with a leading ``▁`` as in sentencepiece, instead of byte-level BPE.
        vocab_size: the greatest number of ids.
    """
    backend = Tokenizer.from_str(_trained(metaspace, vocab_size))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=eos,
        pad_token=pad,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def make_chat(template: str | None = CHATML, *, eos: str = END, **options: object) -> ChatTokenizer:
    """A :class:`ChatTokenizer` on :func:`make_tokenizer` whose only stop id is ``eos``."""
    tokenizer = make_tokenizer(template=template, eos=eos, **options)  # type: ignore[arg-type]
    return ChatTokenizer(tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids(eos)])


@lru_cache
def _trained(metaspace: bool, vocab_size: int) -> str:
    backend = Tokenizer(models.BPE(byte_fallback=False))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    backend.train_from_iterator(_SENTENCES, trainer)
    return backend.to_str()
