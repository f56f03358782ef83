"""Canonical JSON out, strict JSON in."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpkfs.core.canonical import decode, encode
from hpkfs.errors import FormatError

LIMIT = 1_000_000
texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(texts, values, max_size=5)


def read(data: bytes) -> dict[str, object]:
    return decode(data, limit=LIMIT, what="The document")


@settings(deadline=None)
@given(objects)
@example({"\uffff": 1, "\U00010000": 2})
def test_what_is_encoded_decodes_to_the_same_value_and_bytes(value: dict[str, object]) -> None:
    data = encode(value)
    assert read(data) == value
    assert encode(read(data)) == data
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1


@settings(deadline=None)
@given(objects, st.sampled_from([None, 2]), st.booleans())
def test_order_blanks_and_escapes_do_not_matter_on_reading(
    value: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    odd = json.dumps(dict(reversed(value.items())), indent=indent, ensure_ascii=ascii_only)
    assert encode(read(odd.encode())) == encode(value)


@settings(deadline=None)
@given(st.binary(max_size=60) | texts.map(str.encode))
def test_random_bytes_are_refused_or_read_but_fail_in_no_other_way(data: bytes) -> None:
    try:
        value = read(data)
    except FormatError:
        return
    assert read(encode(value)) == value


def test_keys_are_sorted_by_code_point_and_not_by_utf_16() -> None:
    assert encode({"\U00010000": 2, "\uffff": 1}) == '{"\uffff":1,"\U00010000":2}\n'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"[]",
        b'"text"',
        b"1",
        b"null",
        b"\xef\xbb\xbf{}",
        b'{"a":1,"a":1}',
        b'{"o":{"a":1,"b":2,"a":3}}',
        b'{"l":[{"a":1,"\\u0061":2}]}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":-1e400}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"\\udc00":1}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"a":1}x',
        b'{"a":1}{}',
        b'{"a":1}\x00',
        b'{"a":1',
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":"\n"}',
        b'{"a":' + b"9" * 5_000 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_a_document_that_is_not_one_strict_object_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="The document"):
        read(data)


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert read(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_the_limit_itself_is_allowed_and_one_byte_more_is_not() -> None:
    assert decode(b'{"a":1}', limit=7, what="The document") == {"a": 1}
    with pytest.raises(FormatError, match="7 bytes long, and 6"):
        decode(b'{"a":1}', limit=6, what="The document")


def test_a_lone_surrogate_is_never_written() -> None:
    with pytest.raises(FormatError):
        encode({"a": "\udc80"})


def test_a_number_without_end_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": float("inf")})


def test_a_refusal_says_what_happened_what_was_kept_and_what_to_do() -> None:
    with pytest.raises(FormatError) as caught:
        read(b"[]")
    assert (
        caught.value.happened == "The document breaks the storage format: it is not a JSON object."
    )
    assert caught.value.kept
    assert caught.value.next_step
