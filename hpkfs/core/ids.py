"""The scalars of the storage format: ids, digests and timestamps.

Everything that reads or writes a document uses these. All checks match the whole text: a final
newline, which the patterns of the other v2 program let through, is refused here.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta
from typing import Final, NewType

from hpkfs.errors import FormatError

AgentId = NewType("AgentId", str)
SnapshotId = NewType("SnapshotId", str)
DeviceId = NewType("DeviceId", str)
Digest = NewType("Digest", str)

EMPTY_DIGEST: Final = Digest("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
ID_BYTES: Final = 16
NS_PER_SECOND: Final = 1_000_000_000

_AGENT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:Z|([+-])(\d\d):(\d\d))", re.ASCII
)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  UTC by agreement; year 1 minus an offset must not fail
_DAY = timedelta(days=1)


def is_agent_id(text: str) -> bool:
    """Tell whether a text is the id of an agent or a template."""
    return _AGENT_ID.fullmatch(text) is not None


def is_hex32(text: str) -> bool:
    """Tell whether a text is 32 lower-case hex digits, as snapshot and device ids are."""
    return _HEX32.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Tell whether a text is a SHA-256 in 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


def sha256_hex(data: bytes | bytearray | memoryview) -> Digest:
    """Hash the bytes; over 64 KiB the caller does so in a thread."""
    return Digest(hashlib.sha256(data).hexdigest())


def make_id(random_bytes: bytes) -> str:
    """Make a version-4 UUID without dashes out of 16 random bytes (RFC 9562, section 5.4)."""
    assert len(random_bytes) == ID_BYTES
    raw = bytearray(random_bytes)
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    return raw.hex()


def check_timestamp(text: str) -> None:
    """Check a timestamp of a document.

    Raises:
        FormatError: it has another shape, lacks a zone, or is not a real date and time.
    """
    timestamp_ns(text)


def timestamp_ns(text: str) -> int:
    """Convert a timestamp to nanoseconds since 1970 in UTC; digits below 1 ns are dropped.

    Raises:
        FormatError: it has another shape, lacks a zone, or is not a real date and time.
    """
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise _bad_timestamp(text)
    *date_and_time, fraction, sign, offset_hours, offset_minutes = match.groups()
    year, month, day, hour, minute, second = map(int, date_and_time)
    offset = timedelta(hours=int(offset_hours or 0), minutes=int(offset_minutes or 0))
    if offset >= _DAY:
        raise _bad_timestamp(text)
    try:
        local = datetime(year, month, day, hour, minute, second)  # noqa: DTZ001  see _EPOCH
    except ValueError as error:
        raise _bad_timestamp(text) from error
    since = local - _EPOCH + (offset if sign == "-" else -offset)
    seconds = since.days * 86_400 + since.seconds
    return seconds * NS_PER_SECOND + int((fraction or "")[:9].ljust(9, "0"))


def format_timestamp(epoch_seconds: int) -> str:
    """Write seconds since 1970 as the format has them: UTC, to the second, with a Z."""
    return datetime.fromtimestamp(epoch_seconds, UTC).isoformat().replace("+00:00", "Z")


def _bad_timestamp(text: str) -> FormatError:
    return FormatError(
        f"A document holds the timestamp {text[:64]!r}, which is not a date and time with a zone.",
        kept="Nothing was changed.",
    )
