"""The start profile `hpkfs/start.json`: what the last start of the agent read, to come first.

A hint: it never makes a checkpoint by itself, and a damaged one is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpkfs.core import canonical
from hpkfs.core.paths import path_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KIND = "hpkfs-start"
VERSION = 1
MAX_START = 262_144
MAX_CHUNKS = 4_096

# Logical path -> numbers of the 1 MiB ranges that were read, ascending.
Profile = dict[str, tuple[int, ...]]


def parse_start(data: bytes) -> Profile:
    """Parse a start profile.

    Raises:
        FormatError: it is damaged, or of a version that we do not know.
    """
    what = "The start profile hpkfs/start.json"
    document = canonical.decode(data, limit=MAX_START, what=what)
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise canonical.refusal(what, "its kind or version is unknown")
    files = document.get("files")
    if not isinstance(files, dict):
        raise canonical.refusal(what, "it names no files")
    profile: Profile = {}
    for path, chunks in files.items():
        good = isinstance(chunks, list) and all(type(n) is int and n >= 0 for n in chunks)
        if path_problem(path) is not None or not good:
            raise canonical.refusal(what, "an entry breaks its rules")
        profile[path] = tuple(sorted(set(chunks)))
    return profile


def encode_start(profile: Mapping[str, Iterable[int]]) -> bytes:
    """Encode a start profile canonically, at most `MAX_CHUNKS` ranges in path order."""
    files: dict[str, list[int]] = {}
    left = MAX_CHUNKS
    for path in sorted(profile):
        chunks = sorted(set(profile[path]))[:left]
        left -= len(chunks)
        if chunks:
            files[path] = chunks
    return canonical.encode({"files": files, "kind": KIND, "version": VERSION})
