"""The settings that travel, against the vectors and back and forth."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs.core.limits import MAX_PORTABLE
from hpkfs.core.portable import (
    DEFAULT,
    FIELDS,
    MAX_MODEL_CHARACTERS,
    MAX_TOOLSET_CHARACTERS,
    MAX_TOOLSETS,
    PLACES,
    Portable,
    as_values,
    encode_portable,
    parse_portable,
    value_problem,
    with_values,
)
from hpkfs.errors import FormatError

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
CASES = json.loads((VECTORS / "07-portable.json").read_text())

texts = st.text(st.characters(exclude_categories=["Cs"]))
portables = st.builds(
    Portable,
    model=texts.map(lambda text: text[:MAX_MODEL_CHARACTERS]),
    toolsets=st.lists(
        texts.map(lambda text: text[:MAX_TOOLSET_CHARACTERS]).filter(str.strip), max_size=5
    ).map(tuple),
    max_turns=st.integers(1, 1_000),
    memory_enabled=st.booleans(),
    user_profile_enabled=st.booleans(),
    memory_char_limit=st.integers(1, 64_000),
    user_char_limit=st.integers(1, 64_000),
)


def document(case: dict[str, object]) -> bytes:
    text = case["inputUtf8"]
    assert isinstance(text, str)
    data = text.encode()
    return data.ljust(MAX_PORTABLE + 1) if "truncated here" in str(case.get("note")) else data


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["label"])
def test_settings_documents_are_read_as_by_the_peer(case: dict[str, object]) -> None:
    if not case["accepted"]:
        with pytest.raises(FormatError):
            parse_portable(document(case))
        return
    encoded = encode_portable(parse_portable(document(case)))
    assert encoded.decode() == case["canonical"]
    assert hashlib.sha256(encoded).hexdigest() == case["sha256"]


def test_the_default_document_is_the_one_of_the_format() -> None:
    encoded = encode_portable(DEFAULT)
    assert len(encoded) == 191
    assert parse_portable(encoded) == DEFAULT


@given(portables)
def test_what_is_written_is_read_back(portable: Portable) -> None:
    assert parse_portable(encode_portable(portable)) == portable


def test_the_largest_settings_fit_into_the_document() -> None:
    largest = Portable(
        model="\U0001f600" * MAX_MODEL_CHARACTERS,
        toolsets=("\U0001f600" * MAX_TOOLSET_CHARACTERS,) * MAX_TOOLSETS,
    )
    assert parse_portable(encode_portable(largest)) == largest


@pytest.mark.parametrize(
    "text",
    ['{"schemaVersion":true}', '{"schemaVersion":2.0}', '{"schemaVersion":2,"agent.max_turns":1}',
     '{"schemaVersion":2,"max_turns":1}', '{"schemaVersion":2,"agent":{"model":"x"}}',
     '{"schemaVersion":2,"memory":[]}', '{"schemaVersion":2,"toolsets":["a",null]}',
     '{"schemaVersion":2,"toolsets":[["a"]]}', ""],
)  # fmt: skip
def test_a_document_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_portable(text.encode())


def test_a_refusal_names_the_key_and_never_the_value() -> None:
    with pytest.raises(FormatError) as caught:
        parse_portable(b'{"schemaVersion":2,"agent":{"max_turns":987654}}')
    assert "agent.max_turns" in str(caught.value)
    assert "987654" not in str(caught.value)


def test_every_setting_has_a_place_and_a_check() -> None:
    assert {place[-1] for place in PLACES} == set(FIELDS)
    for name in FIELDS:
        assert value_problem(name, as_values(DEFAULT)[name]) is None
        assert value_problem(name, None) is not None


@given(portables, portables)
def test_replacing_all_settings_gives_the_other(one: Portable, other: Portable) -> None:
    assert with_values(one, as_values(other)) == other
    assert with_values(one, {}) == one


def test_a_value_out_of_range_is_never_written() -> None:
    with pytest.raises(AssertionError, match="max_turns"):
        encode_portable(dataclasses.replace(DEFAULT, max_turns=1_001))
