"""Logical paths: which the format allows, how they collide, and how they map to the mount.

A *logical* path is a key of a snapshot's `files`; a *local* path is relative to the mount point,
without a leading slash. The Unicode tables are Python's own (14 to 15.1 in the versions that hpkfs
runs on), as the other v2 program has them.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MAX_PATH_BYTES: Final = 1_024

DATABASE: Final = "conversations/state.sqlite3"
PORTABLE: Final = "config/portable.json"
SIDECAR: Final = "hpkfs/attributes.json"
START: Final = "hpkfs/start.json"
SOUL: Final = "profile/SOUL.md"
USER: Final = "profile/memories/USER.md"
MEMORY: Final = "profile/memories/MEMORY.md"
AGENTS: Final = "workspace/AGENTS.md"
SKILLS: Final = "profile/skills/"
WORKSPACE: Final = "workspace/"

_LOCAL_SKILLS: Final = "skills/"
_SINGLE_FILES: Final = (
    ("SOUL.md", SOUL),
    ("memories/USER.md", USER),
    ("memories/MEMORY.md", MEMORY),
    ("state.db", DATABASE),
    ("config.yaml", PORTABLE),
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Printable ASCII without "/" and "\"; neither "." nor ".."; no blank at either end.
_EDGE = r"[!-.0-\[\]-~]"
_SEGMENT = rf"(?!\.{{1,2}}(?:/|\Z)){_EDGE}(?:[ -.0-\[\]-~]*{_EDGE})?"
_GOOD_ASCII = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def path_problem(logical: str) -> str | None:
    """Say why the format refuses a logical path, as the end of a sentence; None if it does not."""
    if len(logical) <= MAX_PATH_BYTES and _GOOD_ASCII.fullmatch(logical):
        return None
    if not logical:
        return "is empty"
    try:
        length = len(logical.encode("utf-8"))
    except UnicodeEncodeError:
        return "is not Unicode text"
    if length > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES:,} bytes"
    return _text_problem(logical) or _segments_problem(logical.split("/"))


def fold(logical: str) -> str:
    """Give the key under which two paths collide: NFC, then full case folding."""
    if logical.isascii():
        return logical.lower()
    return unicodedata.normalize("NFC", logical).casefold()


def to_logical(local: str) -> str | None:
    """Map a local path to the logical path where its content is stored; None if it has none.

    Only the mapping is asked here, not whether policy lets the path travel.
    """
    normal = local if local.isascii() else unicodedata.normalize("NFC", local)
    if normal.startswith(WORKSPACE):
        return normal if normal != WORKSPACE else None
    if normal.startswith(_LOCAL_SKILLS):
        return SKILLS + normal.removeprefix(_LOCAL_SKILLS) if normal != _LOCAL_SKILLS else None
    return next((logical for single, logical in _SINGLE_FILES if single == normal), None)


def to_local(logical: str) -> str | None:
    """Map a logical path to the local path that shows it; None for a foreign prefix."""
    if logical.startswith(WORKSPACE):
        return logical if logical != WORKSPACE else None
    if logical.startswith(SKILLS):
        return _LOCAL_SKILLS + logical.removeprefix(SKILLS) if logical != SKILLS else None
    return next((single for single, stored in _SINGLE_FILES if stored == logical), None)


def _text_problem(logical: str) -> str | None:
    if "\\" in logical:
        return "contains a backslash"
    if _CONTROL.search(logical):
        return "contains a control character"
    if not unicodedata.is_normalized("NFC", logical):
        return "is not in the Unicode form NFC"
    return None


def _segments_problem(segments: list[str]) -> str | None:
    if not segments[0]:
        return "starts with a slash"
    if not segments[-1]:
        return "ends with a slash"
    for segment in segments:
        if not segment:
            return "has an empty segment"
        if segment in (".", ".."):
            return f'has a segment "{segment}"'
        if segment[0].isspace():
            return "has a segment that starts with a space"
        if segment[-1].isspace():
            return "has a segment that ends with a space"
    return None
