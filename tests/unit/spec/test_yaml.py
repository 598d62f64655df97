from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runner.base.document_value import Value
from runner.base.errors import SpecError
from runner.spec.yaml import MAX_BYTES, parse_yaml


def values(text: str) -> list[object]:
    return [document.value for document in parse_yaml("f.yaml", text.encode())]


def complaint(text: str | bytes) -> str:
    with pytest.raises(SpecError) as caught:
        parse_yaml("f.yaml", text.encode() if isinstance(text, str) else text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0-3", "0-3"),
        ("0,64", "0,64"),
        ("1", 1),
        ("-1", -1),
        ("1_000", 1000),
        ("0x10", 16),
        ("010", 8),
        ("09", "09"),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("500m", "500m"),
        ("80Gi", "80Gi"),
        ("yes", True),
        ("'yes'", "yes"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        (".inf", ".inf"),
        ("~", None),
    ],
)
def test_scalars_are_what_the_kubelet_reads(text: str, value: object) -> None:
    assert values(f"key: {text}\n") == [{"key": value}]


def test_documents_of_one_file_are_numbered() -> None:
    documents = parse_yaml("f.yaml", b"a: 1\n---\n---\nb: {c: x}\n")
    assert [document.value for document in documents] == [{"a": 1}, {"b": {"c": "x"}}]
    with pytest.raises(SpecError) as caught:
        documents[1].get("b").get("c").number()
    assert str(caught.value) == "f.yaml (document 3): b.c: must be a whole number, found 'x'"
    assert parse_yaml("f.yaml", b"# nothing\n") == []


def test_keys_become_strings() -> None:
    assert values("1: a\ntrue: b\n2.5: c\n") == [{"1": "a", "true": "b", "2.5": "c"}]


def test_an_alias_is_written_out_and_a_merge_is_overridden() -> None:
    assert values("base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  x: 3\n") == [
        {"base": {"x": 1, "y": 2}, "other": {"x": 3, "y": 2}}
    ]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(i + 1)}: &{chr(i + 1)} [{','.join([f'*{chr(i)}'] * 10)}]\n" for i in range(97, 110)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is repeated"),
        ("b:\n  - {a: 1, 'a': 2}\n", "line 2, column 12: the key 'a' is repeated"),
        ("a: [\n", "line 2, column 1: expected the node content, but found '<stream end>'"),
        ("a: &a [*a]\n", "line 1, column 4: an alias contains itself"),
        ("[" * 100_000, "it is nested too deeply"),
        (BOMB, "more than 100000 values with aliases expanded"),
        ("[" + "a," * 200_000 + "a]", "line 1, column 200002: more than 100000 values"),
        ("{[1]: 2}", "line 1, column 2: a key must be a scalar"),
        ("a: !!python/object:os.system x", "could not determine a constructor for the tag"),
        (b"\xff\xfe\x00", "truncated data"),
        ("a: \x00", "special characters are not allowed"),
        ("a: " + "9" * 5000, "Exceeds the limit (4300 digits)"),
    ],
    ids=["twice", "twice-inside", "end", "itself", "deep", "bomb", "many", "key", "tag", "utf-16", "nul", "digits"],
)
def test_unsupported_yaml_is_refused(text: str | bytes, message: str) -> None:
    assert complaint(text).startswith("f.yaml: cannot parse the document as YAML: ")
    assert message in complaint(text)


def test_a_text_that_is_too_long_is_not_even_read() -> None:
    assert "bytes are more than" in complaint(b" " * (MAX_BYTES + 1))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_random_text_gives_only_a_spec_error(data: bytes) -> None:
    try:
        documents = parse_yaml("f.yaml", data)
    except SpecError as error:
        assert str(error).startswith("f.yaml: cannot parse the document as YAML: ")  # noqa: PT017
    else:
        assert all(isinstance(document, Value) for document in documents)


# PyYAML writes the string 1e5 without quotation marks, because it takes no number without a point for one; Kubernetes does.
TEXT = st.text(alphabet=st.characters(categories=["L", "N", "P"]), max_size=8).filter(
    lambda text: re.fullmatch(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", text) is None
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet=st.characters(categories=["L"]), min_size=1, max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_written_yaml_is_read_back_the_same(value: object) -> None:
    assert values(yaml.safe_dump({"key": value})) == [{"key": value}]
