"""One raw row of a ShareGPT, messages or text file to turns with the four roles of chat templates.

A row that is nearly right is repaired, and one that is not is refused, both by name; what the
fields of the format's many dialects are called is all here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": (
        "assistant",
        "gpt",
        "chatgpt",
        "gpt-3.5",
        "gpt-4",
        "bot",
        "chatbot",
        "model",
        "ai",
    ),
    "tool": ("tool", "function", "observation", "ipython"),
}
_ROLE_OF = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
_CHAT_KEYS = ("conversations", "messages", "conversation")
KEPT_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")

# Repairs and reasons as reports show them.
LEADING_ASSISTANT = "turns before the first user turn removed"
JOINED = "neighbouring turns of one role joined by a blank line"
TRAILING = "turns after the last answer removed"
NUMBER_AS_TEXT = "number taken as text"
PARTS_JOINED = "content parts joined to one text"
NO_DATA = "no conversations, messages or text key"
NO_TURNS = "no turns"
NO_ANSWER = "no assistant turn"
NO_USER = "no user turn"
UNKNOWN_ROLE = "unknown role"
NULL_CONTENT = "a turn without content"
EMPTY_CONTENT = "an empty turn"
NOT_TEXT = "a turn whose content is not text"
NOT_A_ROW = "not a JSON object, list of turns or text"
BROKEN_TEXT = "text that is not valid Unicode"
BAD_CALLS = "tool calls or tools that are no list of objects"


class RowRefusedError(Exception):
    """A row cannot be used.

    Args:
        reason: one of this module's reasons; rows are counted by it.
        detail: what was found in this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Turns:
    """A row's content: a chat, or plain text.

    Attributes:
        messages: the turns; empty for plain text.
        text: the plain text; None for a chat.
        tools: tool descriptions that the template shows the model.
        repairs: what was repaired, in order.
        later: of a prompt, the turns of the user after the first answer, up to what cannot be
            asked again (the result of a tool, a system turn).
    """

    messages: tuple[dict[str, Any], ...]
    text: str | None
    tools: tuple[Any, ...] | None
    repairs: tuple[str, ...]
    later: tuple[dict[str, Any], ...] = ()


def read_turns(row: Any, *, need_answer: bool = True) -> Turns:
    """Read one raw row.

    Args:
        row: a JSON object of any known dialect, a list of turns, or a text.
        need_answer: whether the row must end with an answer; False reads a prompt, which ends
            before the first answer.

    Raises:
        RowRefusedError: the row cannot be used.
    """
    repairs: list[str] = []
    raw_turns, text = _content_of(row)
    if text is not None:
        if not text.strip():
            raise RowRefusedError(EMPTY_CONTENT)
        _check_unicode(text)
        return Turns((), text, None, ())
    if not raw_turns:
        raise RowRefusedError(NO_TURNS)
    messages = [_message(turn, repairs) for turn in raw_turns]
    messages = _joined(_from_first_user(messages, repairs), repairs)
    later = () if need_answer else _later_turns(messages, row)
    messages = _with_answer(messages, repairs) if need_answer else _before_answer(messages)
    return Turns(tuple(messages), None, _tools_of(row), tuple(dict.fromkeys(repairs)), later)


def _content_of(row: Any) -> tuple[Sequence[Any], str | None]:
    """The raw turns of a row, or its plain text."""
    if isinstance(row, str):
        return (), row
    if isinstance(row, list):
        return row, None
    if not isinstance(row, Mapping):
        raise RowRefusedError(NOT_A_ROW, type(row).__name__)
    key = next((key for key in _CHAT_KEYS if row.get(key) is not None), None)
    if key is not None:
        if not isinstance(row[key], list):
            raise RowRefusedError(NOT_A_ROW, f"{key}: {type(row[key]).__name__}")
        return row[key], None
    # A list of questions (MT-Bench) is asked one after the other: the first is the prompt.
    if isinstance(questions := row.get("turns"), list):
        return [{"role": "user", "content": question} for question in questions[:1]], None
    if (prompt := row.get("prompt")) is not None:
        answer = row.get("completion", row.get("response"))
        return [*_side(prompt, "user"), *_side(answer, "assistant")], None
    # Before "text": Alpaca's own files repeat the row there, in a prompt format of another model.
    if row.get("instruction") is not None:
        return _alpaca_turns(row), None
    text = row.get("text")
    if not isinstance(text, str):
        raise RowRefusedError(NO_DATA if text is None else NOT_TEXT)
    return (), text


def _side(value: Any, role: str) -> list[Any]:
    """The turns of a prompt or of its completion: a list of turns, one text, or nothing."""
    if value is None:
        return []
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _alpaca_turns(row: Mapping[str, Any]) -> list[Any]:
    """The turns of an Alpaca row, with its ``system`` and ``history``."""
    question, context = row["instruction"], row.get("input")
    if isinstance(question, str) and isinstance(context, str):
        question = "\n\n".join(part for part in (question, context) if part.strip())
    elif context is not None:
        raise RowRefusedError(NOT_TEXT, f"input: {type(context).__name__}")
    earlier = row.get("history") or []
    if not isinstance(earlier, list) or not all(_is_pair(pair) for pair in earlier):
        raise RowRefusedError(NOT_A_ROW, "history: must be pairs of a question and its answer")
    return [
        *_side(row.get("system") or None, "system"),
        *(turn for pair in earlier for turn in _of_pair(*pair)),
        *_side(question, "user"),
        # A row that is only a prompt has an empty output.
        *_side(row.get("output") or None, "assistant"),
    ]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _of_pair(asked: Any, said: Any) -> list[Any]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _message(turn: Any, repairs: list[str]) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowRefusedError(NOT_A_ROW, f"a turn that is a {type(turn).__name__}")
    raw_role = turn.get("from", turn.get("role"))
    raw_role = turn.get("role") if raw_role is None else raw_role
    role = _ROLE_OF.get(str(raw_role).strip().casefold())
    if role is None:
        raise RowRefusedError(UNKNOWN_ROLE, repr(raw_role))
    content = turn.get("value")
    content = turn.get("content") if content is None else content
    extra = {key: turn[key] for key in KEPT_KEYS if turn.get(key)}
    if "tool_calls" in extra:
        extra["tool_calls"] = _calls(extra["tool_calls"])
    if content is None and "tool_calls" in extra:
        content = ""
    text = _as_text(content, repairs)
    if not text.strip() and not (role == "tool" or "tool_calls" in extra):
        raise RowRefusedError(EMPTY_CONTENT, role)
    _check_unicode(text)
    if extra:
        _check_json(extra)
    return {"role": role, "content": text, **extra}


def _as_text(content: Any, repairs: list[str]) -> str:
    match content:
        case str():
            return content
        case None:
            raise RowRefusedError(NULL_CONTENT)
        case bool():
            raise RowRefusedError(NOT_TEXT, "bool")
        case int() | float():
            repairs.append(NUMBER_AS_TEXT)
            return str(content)
        case list() if content and all(_is_text_part(part) for part in content):
            repairs.append(PARTS_JOINED)
            return "".join(part["text"] for part in content)
        case _:
            raise RowRefusedError(NOT_TEXT, type(content).__name__)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which no tokenizer takes.
        raise RowRefusedError(BROKEN_TEXT, f"character {error.start}") from error


def _check_json(value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError as error:
        raise RowRefusedError(BAD_CALLS, "nested too deeply") from error
    _check_unicode(text)


def _calls(value: Any) -> list[Any]:
    """Tool calls as templates read them; each may say its function, an object too."""
    calls = _parsed(value, "tool calls") if isinstance(value, str) else value
    is_list = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
    if not is_list or not all(isinstance(call.get("function") or {}, Mapping) for call in calls):
        raise RowRefusedError(BAD_CALLS, "tool calls")
    return list(calls)


def _from_first_user(messages: list[dict[str, Any]], repairs: list[str]) -> list[dict[str, Any]]:
    """System turns at the start, then everything from the first user turn on."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise RowRefusedError(NO_USER, ", ".join(dict.fromkeys(roles)))
    first = roles.index("user")
    system = [message for message in messages[:first] if message["role"] == "system"]
    if len(system) < first:
        repairs.append(LEADING_ASSISTANT)
    return [*system, *messages[first:]]


def _joined(messages: list[dict[str, Any]], repairs: list[str]) -> list[dict[str, Any]]:
    """Neighbouring turns of one role as one; results of several tool calls stay apart."""
    result: list[dict[str, Any]] = []
    for message in messages:
        before = result[-1] if result else None
        can_join = (
            before is not None
            and before["role"] == message["role"] != "tool"
            and before.keys() == message.keys() == {"role", "content"}
        )
        if can_join:
            assert before is not None
            content = f"{before['content']}\n\n{message['content']}"
            result[-1] = {**before, "content": content}
            repairs.append(JOINED)
        else:
            result.append(message)
    return result


def _with_answer(messages: list[dict[str, Any]], repairs: list[str]) -> list[dict[str, Any]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowRefusedError(NO_ANSWER)
    if answers[-1] + 1 < len(messages):
        repairs.append(TRAILING)
    return messages[: answers[-1] + 1]


def _before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def _later_turns(messages: list[dict[str, Any]], row: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(row, Mapping) and isinstance(questions := row.get("turns"), list):
        return tuple(_message({"role": "user", "content": text}, []) for text in questions[1:])
    later = []
    for message in messages[len(_before_answer(messages)) :]:
        if message["role"] not in {"user", "assistant"}:
            break
        if message["role"] == "user":
            later.append(message)
    return tuple(later)


def _tools_of(row: Any) -> tuple[Any, ...] | None:
    tools = row.get("tools") if isinstance(row, Mapping) else None
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    _check_json(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRefusedError(BAD_CALLS, "tools")
    return tuple(tools)


def _parsed(value: str, what: str) -> Any:
    """JSON that a file keeps as text, since its structure varies."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowRefusedError(NOT_TEXT, f"{what} that are not valid JSON") from error
