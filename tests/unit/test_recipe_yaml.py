"""Reading YAML without the traps of YAML 1.1, and writing what is read back unchanged."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.recipe.yaml_reader import dump, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E3", 2000.0),
        ("1.5e+3", 1500.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("7", 7),
        ("+7", 7),
        ("0", 0),
        ("0x1f", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("=", "="),
        ("'012'", "012"),
        ('"1e-4"', "1e-4"),
        ("!!str 5", "5"),
        ("~", None),
        ("null", None),
        ("", None),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_a_value_is_what_it_looks_like(text, value):
    document = read(f"key: {text}")
    assert document.problems == []
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("a: 1\nb: 012", 2, ("b",), "012 could be octal; write 12, or '012' for text"),
        ("a: -007", 1, ("a",), "-007 could be octal; write -7, or '-007' for text"),
        ("a: .inf", 1, ("a",), "must be finite; got .inf"),
        ("a: -.INF", 1, ("a",), "must be finite; got -.INF"),
        ("a: .nan", 1, ("a",), "must be finite; got .nan"),
        ("a: 1e999", 1, ("a",), "must be finite; got 1e999"),
        ("a: 1\n\na: 2", 3, ("a",), "the key is here twice, first on line 1; remove one"),
        ("a: {b: 1, b: 1}", 1, ("a", "b"), "the key is here twice, first on line 1; remove one"),
        ("a:\n  1: 2", 2, ("a",), "a key must be text; got 1; put it in quotes"),
        ("true: 2", 1, (), "a key must be text; got true; put it in quotes"),
        ("? [a]\n: 2", 1, (), "a key must be text; got a list or section; put it in quotes"),
        ("<<: {a: 1}", 1, (), "merge keys (<<) are not read; write the keys out"),
        ("a: &x {b: *x}", 1, ("a", "b"), "an alias may not contain itself"),
        ("a: !!python/name:os.system x", 1, ("a",), "the tag on 'x' is not read; write the value"),
        ("a: !!int x", 1, ("a",), "the tag on 'x' is not read; write the value alone"),
        ("a:\n\tb: 1", 2, (), "not valid YAML: a tab where YAML wants spaces; indent with spaces"),
        ("a: 1\n  b: 2", 2, (), "not valid YAML: no key can begin here; check the indentation"),
        ("a: @x", 1, (), "not valid YAML: found character '@' that cannot start any token; put"),
        ("a: *x", 1, (), "not valid YAML: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2", 2, (), "not valid YAML: a second document begins here; a recipe is"),
        ("a: \x01", 0, (), "not valid YAML: a character that YAML does not allow: #x0001"),
        ("a: [1,\n", 2, (), "not valid YAML: "),
    ],
)
def test_a_trap_is_a_problem_on_its_line(text, line, key, message):
    (problem,) = read(text).problems
    assert (problem.line, problem.key) == (line, key)
    assert problem.message.startswith(message)


def test_every_problem_is_found_and_the_other_values_are_kept():
    document = read("a: 012\nb: 3\nb: 4\nc: .inf\nd: [1, 09]")
    assert [problem.key for problem in document.problems] == [("a",), ("b",), ("c",), ("d", 1)]
    assert document.value == {"a": None, "b": 3, "c": None, "d": [1, None]}


def test_lines_are_those_of_the_keys():
    lines = read("a:\n  b: 1\n\n  c:\n    - 2\n    - 3\n").lines
    assert {key: line for key, line in lines.items() if key} == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 4,
        ("a", "c", 0): 5,
        ("a", "c", 1): 6,
    }


def test_aliases_are_copies():
    value = read("a: &x {b: 1}\nc: *x").value
    value["a"]["b"] = 2
    assert value["c"] == {"b": 1}


def test_aliases_that_multiply_are_stopped():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (problem,) = read("\n".join(lines)).problems
    assert problem.message == "more than 100000 values"


def test_a_byte_order_mark_and_an_empty_text():
    assert read("\ufeffa: 1").value == {"a": 1}
    assert read("").value is None
    assert read("# nothing\n").value is None


TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=40)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | st.sampled_from(["no", "012", "1e-4", "1:30", "null", "0x1f", "<<", "a\nb\n", "a\n\n", " a"])
)
VALUES = st.dictionaries(
    TEXTS,
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)),
)


@given(VALUES)
def test_what_is_written_is_read_back_unchanged(value):
    text = dump(value)
    document = read(text)
    if "<<" not in text:  # a key that a recipe cannot have
        assert document.problems == []
        assert document.value == value


def test_what_is_written_means_the_same_to_a_reader_of_yaml_1_1():
    value = {"eval_strategy": "no", "revision": "012", "time": "1:30", "flag": True, "rate": 1e-5}
    assert yaml.safe_load(dump(value)) == value
