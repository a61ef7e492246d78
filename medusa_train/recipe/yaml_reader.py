"""YAML text → plain values and the line of each, without the traps of YAML 1.1.

PyYAML reads ``1e-4`` as a string, ``012`` as ten, ``no`` as false, ``1:30`` as ninety and keeps the
last of two equal keys without a word. Here ``1e-4`` is a number, ``no`` and ``1:30`` are text, and
``012`` and equal keys are errors. :func:`dump` writes what :func:`read` reads back unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.emitter import Emitter
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.representer import SafeRepresenter
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner
from yaml.serializer import Serializer

Key = tuple[str | int, ...]
"""Where a value lies: ``("data", "distill", "seed")``."""

MAX_VALUES = 100_000
"""More values than any recipe has; aliases of aliases of aliases can multiply without end."""

_SHOWN_LENGTH = 60

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+$")


class _Resolver(BaseResolver):
    """YAML 1.2's core rules for what a plain scalar is, and that for reading and writing."""


for _name, _pattern, _first in (
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Resolver.add_implicit_resolver(_TAG + _name, _pattern, _first)


_YAML_1_1 = yaml.resolver.Resolver()


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)


class _Dumper(Emitter, Serializer, SafeRepresenter, _Resolver):
    def __init__(self, stream: Any, **options: Any) -> None:
        style = {name: options.get(name) for name in ("indent", "width", "allow_unicode")}
        Emitter.__init__(self, stream, **style)
        Serializer.__init__(self)
        SafeRepresenter.__init__(self, default_flow_style=False, sort_keys=False)
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the name is PyYAML's
        return True

    def represent_text(self, text: str) -> ScalarNode:
        """Quote what a YAML 1.1 reader would not take for text either, such as ``no``."""
        style = "|" if "\n" in text else None
        if _YAML_1_1.resolve(ScalarNode, text, (True, False)) != f"{_TAG}str":  # type: ignore[no-untyped-call]
            style = "'"
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the line it is on (0: no line), the key it concerns, and what is wrong."""

    line: int
    key: Key
    message: str


@dataclass(slots=True)
class Document:
    """The values of a YAML text and where they are."""

    value: Any = None
    lines: dict[Key, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(text: str) -> Document:
    """Read one YAML document; mistakes go to ``problems`` and never raise."""
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.value = _Builder(document).build(node, key=())
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error))
    except RecursionError:
        document.problems.append(Problem(0, (), "not valid YAML: nested too deeply"))
    return document


def dump(value: Mapping[str, Any]) -> str:
    """``value`` as YAML that :func:`read` reads back unchanged, in the order of its keys."""
    text = yaml.dump_all([value], Dumper=_Dumper, width=100, allow_unicode=True)
    assert isinstance(text, str)
    return text


def show(value: Any) -> str:
    """``value`` as a recipe would write it, and no longer than a line has room for."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in problem:
        problem = "a tab where YAML wants spaces; indent with spaces"
    elif problem.startswith("mapping values"):
        problem = "no key can begin here; check the indentation, and quote text that holds ': '"
    elif "cannot start any token" in problem:
        problem += "; put the text in quotes"
    elif "another document" in problem:
        problem = "a second document begins here; a recipe is one document"
    elif isinstance(error, yaml.reader.ReaderError):
        problem = f"a character that YAML does not allow: #x{error.character:04x}"
    return Problem(mark.line + 1 if mark else 0, (), f"not valid YAML: {problem}")


class _Builder:
    """Turns nodes into values; a mistake becomes a problem and the value ``None``."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: list[Node] = []
        self._count = 0

    def build(self, node: Node, *, key: Key) -> Any:
        self._document.lines.setdefault(key, _line(node))
        self._count += 1
        if self._count == MAX_VALUES:
            return self._problem(node, key, f"more than {MAX_VALUES} values")
        if self._count > MAX_VALUES:
            return None
        if any(node is parent for parent in self._open):
            return self._problem(node, key, "an alias may not contain itself")
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, key)
            if isinstance(node, SequenceNode):
                return [self.build(item, key=(*key, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, ScalarNode)
            return self._scalar(node, key)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            if not isinstance(key_node, ScalarNode) or key_node.tag != f"{_TAG}str":
                shown = name if isinstance(key_node, ScalarNode) else "a list or section"
                self._problem(key_node, key, f"a key must be text; got {shown}; put it in quotes")
            elif name == "<<" and key_node.style is None:
                self._problem(key_node, key, "merge keys (<<) are not read; write the keys out")
            elif name in result:
                message = f"the key is here twice, first on line {first_lines[name]}; remove one"
                self._problem(key_node, (*key, name), message)
            else:
                first_lines[name] = _line(key_node)
                self._document.lines[(*key, name)] = _line(key_node)
                result[name] = self.build(value_node, key=(*key, name))
        return result

    def _scalar(self, node: ScalarNode, key: Key) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            case "int" if _LEADING_ZERO.match(text):
                message = f"{text} could be octal; write {int(text)}, or '{text}' for text"
                return self._problem(node, key, message)
            case "int" if _INT.match(text):
                return int(text, 0)
            case "float" if _FLOAT.match(text) or _INT.match(text):
                number = float(re.sub(r"\.(?=[inIN])", "", text))
                if math.isfinite(number):
                    return number
                return self._problem(node, key, f"must be finite; got {text}")
        return self._problem(node, key, f"the tag on {text!r} is not read; write the value alone")

    def _problem(self, node: Node, key: Key, message: str) -> None:
        self._document.problems.append(Problem(_line(node), key, message))


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
