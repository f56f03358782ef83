"""Ids, digests and timestamps."""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkfs.core.ids import (
    EMPTY_DIGEST,
    check_timestamp,
    format_timestamp,
    is_agent_id,
    is_digest,
    is_hex32,
    make_id,
    sha256_hex,
    timestamp_ns,
)
from hpkfs.errors import FormatError


@pytest.mark.parametrize("text", ["a", "0", "default", "a-b_c9", "a" * 64])
def test_an_agent_id_within_the_pattern_is_accepted(text: str) -> None:
    assert is_agent_id(text)


@pytest.mark.parametrize("text", ["", "A", "-a", "_a", "a" * 65, "a b", "a\n", "\na", "é", "a/b"])
def test_an_agent_id_outside_the_pattern_is_refused(text: str) -> None:
    assert not is_agent_id(text)


@pytest.mark.parametrize(("check", "digits"), [(is_hex32, 32), (is_digest, 64)])
def test_hex_is_lower_case_and_of_one_length_and_has_no_final_newline(
    check: object, digits: int
) -> None:
    assert callable(check)
    assert check("0123456789abcdef" * (digits // 16))
    wrong = ("f" * (digits - 1), "f" * (digits + 1), "F" * digits, "g" * digits, "")
    for text in (*wrong, "f" * digits + "\n", "f" * (digits - 1) + "\n", "١" * digits):
        assert not check(text), text


def test_the_empty_digest_is_that_of_no_bytes() -> None:
    assert sha256_hex(b"") == EMPTY_DIGEST == hashlib.sha256().hexdigest()


@given(st.binary(min_size=16, max_size=16))
def test_an_id_is_a_random_uuid_of_version_4(raw: bytes) -> None:
    made = make_id(raw)
    assert is_hex32(made)
    assert uuid.UUID(made).version == 4
    assert made == uuid.UUID(bytes=raw, version=4).hex


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.5Z", 500_000_000),
        ("1970-01-01T00:00:00.1234567899Z", 123_456_789),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1969-12-31T23:30:00-00:30", 0),
        ("1969-12-31T23:59:59.25Z", -750_000_000),
        ("2026-01-02T03:04:05Z", 1_767_323_045_000_000_000),
        ("0001-01-01T00:00:00+23:59", -62_135_596_800_000_000_000 - 86_340_000_000_000),
        ("9999-12-31T23:59:59-23:59", 253_402_300_799_000_000_000 + 86_340_000_000_000),
    ],
)
def test_a_timestamp_becomes_nanoseconds_in_utc(text: str, expected: int) -> None:
    check_timestamp(text)
    assert timestamp_ns(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-01-02",
        "2026-01-02T03:04:05",
        "2026-01-02 03:04:05Z",
        "2026-01-02t03:04:05Z",
        "2026-01-02T03:04:05z",
        "2026-01-02T03:04:05Z\n",
        "2026-01-02T03:04Z",
        "2026-01-02T03:04:05.Z",
        "2026-01-02T03:04:05,5Z",
        "2026-01-02T03:04:60Z",
        "2026-01-02T24:00:00Z",
        "2026-02-29T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "2026-01-02T03:04:05+24:00",
        "2026-01-02T03:04:05-99:00",
        "2026-01-02T03:04:05+0200",
        "2026-01-02T03:04:05+02",
        "٢026-01-02T03:04:05Z",
        "-026-01-02T03:04:05Z",
    ],
)
def test_what_is_no_real_time_with_a_zone_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        check_timestamp(text)


@settings(deadline=None)
@given(st.integers(-62_135_596_800, 253_402_300_799))
def test_a_written_timestamp_reads_back_as_the_same_second(seconds: int) -> None:
    text = format_timestamp(seconds)
    assert len(text) == 20
    assert text.endswith("Z")
    assert timestamp_ns(text) == seconds * 1_000_000_000


@given(st.datetimes(timezones=st.timezones()))
def test_a_timestamp_in_any_zone_agrees_with_the_standard_library(moment: datetime) -> None:
    text = moment.replace(microsecond=0).isoformat()
    whole_minutes = len(text) == len("2026-01-02T03:04:05+00:00")
    if whole_minutes:
        since = datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)
        assert timestamp_ns(text) == (since.days * 86_400 + since.seconds) * 1_000_000_000
    else:  # local mean time of long ago, which has seconds in its offset
        with pytest.raises(FormatError):
            timestamp_ns(text)
