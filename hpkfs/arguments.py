"""What a person types becomes values: sizes, times, checkpoints, mount options, arguments.

`cli.py` is the only caller. Nothing here looks at the disk.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NoReturn

from hpkfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

USAGE_EXIT_CODE: Final = 1
SIZE_BYTES_MAX: Final = 1 << 60
SECONDS_MAX: Final = 86_400.0
ID_MAX: Final = 2**32 - 2
UMASK_MAX: Final = 0o777
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*(?:([KMGT])(?:iB|B)?|B)?", re.IGNORECASE | re.ASCII)
_SHIFTS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(?:s|sec|seconds?)?", re.IGNORECASE | re.ASCII)
_AGO = re.compile(
    r"(\d{1,9}|an?)\s*(second|minute|hour|day|week)s?\s+ago", re.IGNORECASE | re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:[Zz]|[+-]\d\d:\d\d)?", re.ASCII
)
_CHECKPOINT = re.compile(r"[0-9a-f]{6,32}")
# A folder of .hpkfs/history: the time, then the id.
_HISTORY_NAME = re.compile(r"\d{4}-\d\d-\d\dT[0-9TZ.+-]+-([0-9a-f]{32})/?", re.ASCII)
_IGNORED_OPTIONS: Final = frozenset(
    {"_netdev", "noauto", "auto", "nofail", "user", "defaults", "rw"}
)


@dataclass(frozen=True, slots=True)
class ListedOptions:
    """What the `-o` lists say; None where they say nothing."""

    read_only: bool | None = None
    at: str | None = None
    offline: bool | None = None
    lazy: bool | None = None
    state_dir: str | None = None
    cache_size_bytes: int | None = None
    seal_after_s: float | None = None
    allow_other: bool | None = None
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    showhistory: bool | None = None
    xattr: bool | None = None

    def said(self) -> dict[str, object]:
        """Return what was said, by the names of `MountOptions`."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}


def parse_size(text: str) -> int:
    """Parse a size such as `256M` or `2G`, in powers of 1024, into bytes.

    Raises:
        UsageError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    size = -1
    if found:
        unit = 1 << _SHIFTS[(found[2] or "").upper()]
        size = int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    if not 0 <= size <= SIZE_BYTES_MAX:
        raise UsageError(f"{text!r} is no size.", next_step="Write it as 256M or 2G.")
    return size


def parse_seconds(text: str) -> float:
    """Parse a number of seconds, up to a day.

    Raises:
        UsageError: it is no such number.
    """
    found = _SECONDS.fullmatch(text.strip())
    seconds = float(found[1]) if found else -1.0
    if not 0 <= seconds <= SECONDS_MAX:
        raise UsageError(f"{text!r} is no number of seconds.", next_step="Write it as 30.")
    return seconds


def parse_checkpoint(text: str, *, now: datetime) -> str:
    """Parse what names a checkpoint: its id or the start of it, or a time.

    Args:
        text: hex digits, a folder name of `.hpkfs/history`, or what `parse_moment` takes.
        now: the current time with its zone.

    Returns:
        Hex digits, or a time in RFC 3339 and UTC, which has a `T`.

    Raises:
        UsageError: it is neither.
    """
    text = text.strip()
    if _CHECKPOINT.fullmatch(text.lower()):
        return text.lower()
    if found := _HISTORY_NAME.fullmatch(text):
        return found[1]
    return _format_moment(parse_moment(text, now=now))


def parse_moment(text: str, *, now: datetime) -> datetime:
    """Parse a time.

    Args:
        text: RFC 3339, a date (its end is meant, in the zone of `now`), or as in `3 days ago`;
            a time without a zone is in the zone of `now`.
        now: the current time with its zone.

    Raises:
        UsageError: it is none of these.
    """
    try:
        if found := _AGO.fullmatch(text):
            count = 1 if found[1].lower() in {"a", "an"} else int(found[1])
            return now - timedelta(**{f"{found[2].lower()}s": count})
        if _DATE.fullmatch(text):
            day = datetime.fromisoformat(text).replace(tzinfo=now.tzinfo)
            return day + timedelta(days=1) - timedelta(microseconds=1)
        if _TIME.fullmatch(text):
            moment = datetime.fromisoformat(text.upper())
            return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"{text!r} names no checkpoint and no time.",
        next_step=(
            "Give at least six digits of an id, or a time as 2026-11-30, 2026-11-30T12:00:00Z or "
            "'3 days ago'."
        ),
    )


def _format_moment(moment: datetime) -> str:
    try:
        text = moment.astimezone(UTC).isoformat()
    except OverflowError as error:
        raise UsageError(f"The time {moment} is out of range.") from error
    return text.removesuffix("+00:00") + "Z"


def parse_listed(lists: Iterable[str], *, now: datetime) -> ListedOptions:
    """Parse the values of `-o`: comma-separated; a comma in a value has a backslash before it.

    Raises:
        UsageError: an option is unknown, or its value is wrong.
    """
    said: dict[str, object] = {}
    valued: dict[str, tuple[str, Callable[[str], object]]] = {
        "uid": ("uid", lambda text: _parse_id("uid", text)),
        "gid": ("gid", lambda text: _parse_id("gid", text)),
        "umask": ("umask", _parse_umask),
        "cache_size": ("cache_size_bytes", parse_size),
        "seal_after": ("seal_after_s", parse_seconds),
        "state_dir": ("state_dir", str),
        "at": ("at", lambda text: parse_checkpoint(text, now=now)),
    }
    flags = {"ro": "read_only"}
    flags |= {name: name for name in ("allow_other", "showhistory", "xattr", "offline", "lazy")}
    for option in _split(lists):
        name, equals, value = option.partition("=")
        if name in valued and value:
            field, parse = valued[name]
            said[field] = parse(value)
        elif name in flags and not equals:
            said[flags[name]] = True
        elif option not in _IGNORED_OPTIONS and not name.startswith("x-systemd."):
            raise _unknown_option(option, name in valued or name in flags)
    return ListedOptions(**said)  # type: ignore[arg-type]  # each parser gives its field's type


def _split(lists: Iterable[str]) -> list[str]:
    options = [option for text in lists for option in re.findall(r"(?:\\.|[^,\\])+", text)]
    return [re.sub(r"\\(.)", r"\1", option) for option in options]


def _unknown_option(option: str, known: bool) -> UsageError:
    if known:
        return UsageError(f"The mount option {option!r} lacks its value, or takes none.")
    return UsageError(
        f"The mount option {option!r} is unknown.",
        kept="Nothing was mounted.",
        next_step="`hpkfs mount --help` lists the options.",
    )


def _parse_id(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > ID_MAX:
        raise UsageError(f"{name}={text} is no user or group number.")
    return int(text)


def _parse_umask(text: str) -> int:
    if not re.fullmatch(r"[0-7]{1,4}", text) or int(text, 8) > UMASK_MAX:
        raise UsageError(f"umask={text} is no octal number from 0 to 777.")
    return int(text, 8)


class Parser(argparse.ArgumentParser):
    """An argument parser whose usage errors end with 1, and never abbreviate."""

    def __init__(self, *, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and end."""
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: {message}\n")
