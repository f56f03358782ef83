"""The sidecar `hpkfs/attributes.json`: what format v2 cannot carry of what travels.

`sealer.py` writes it into each checkpoint, `refresher.py` applies it. It lies under a prefix
that other v2 programs do not know, so they carry it unread from checkpoint to checkpoint while
the files beside it change: every file's entry therefore names the digest it belongs to, and is
void for any other. A sidecar that cannot be read costs times and modes, never a mount: callers
catch the `FormatError`. The document is described in `docs/format.md`, "Sidecar".
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hpkfs.core import canonical
from hpkfs.core.ids import Digest, is_digest
from hpkfs.core.limits import MAX_OTHER_FILE
from hpkfs.core.paths import path_problem
from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

KIND = "hpkfs-attributes"
VERSION = 1
MAX_SIDECAR = MAX_OTHER_FILE
MAX_TARGET_BYTES = 4_095  # symlink(2): PATH_MAX without its final NUL
MAX_XATTR_NAME_BYTES = 255  # xattr(7)
MAX_XATTR_VALUE_BYTES = 65_536
# Set-user-ID and set-group-ID never travel: a checkpoint must not hand out privileges.
MODE_MASK = 0o1777
# Other namespaces are this machine's own security (xattr(7)).
XATTR_NAMESPACE = "user."
_TIME_RANGE_NS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file has beyond its record.

    Attributes:
        sha256: the digest of the content that the entry belongs to.
        mtime_ns: time of last modification, in ns since 1970.
        mode: the permission bits, without set-user-ID and set-group-ID.
        xattrs: extended attributes of the namespace `user`.
    """

    sha256: Digest
    mtime_ns: int
    mode: int
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """What a folder has; the format knows folders only by the files in them.

    Attributes:
        mode: as in `Entry`.
        xattrs: as in `Entry`.
        empty: whether it must be made because no file that travels lies below it.
    """

    mode: int
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Attributes:
    """A whole sidecar; the keys are logical paths.

    Attributes:
        files: entries of files that the snapshot records.
        links: symbolic links, each with its target as it stands on disk. A path that is also a
            recorded file is that file.
        folders: folders whose mode, attributes or emptiness must be kept.
    """

    files: Mapping[str, Entry] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, FolderEntry] = field(default_factory=dict)


EMPTY = Attributes()


def carried_xattrs(xattrs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Select the extended attributes that a sidecar can carry; the others stay on the machine."""
    return {name: value for name, value in xattrs.items() if _xattr_problem(name, value) is None}


def target_problem(target: str) -> str | None:
    """Say why a link's target cannot be carried, as the end of a sentence; None if it can."""
    try:
        length = len(target.encode("utf-8"))
    except UnicodeEncodeError:
        return "leads to a name that is not UTF-8"
    if not 0 < length <= MAX_TARGET_BYTES or "\0" in target:
        return "has a target that no link can have"
    return None


def parse_attributes(data: bytes) -> Attributes:
    """Parse a sidecar; keys at the top that we do not know are ignored.

    Raises:
        FormatError: it is damaged, or of a version that we do not know.
    """
    document = canonical.decode(data, limit=MAX_SIDECAR, what="The sidecar hpkfs/attributes.json")
    if document.get("kind") != KIND:
        raise _refused("its kind is unknown")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise _refused("its version is unknown")
    return Attributes(
        files=_parse_map(document, "files", _parse_entry),
        links=_parse_map(document, "links", _parse_target),
        folders=_parse_map(document, "folders", _parse_folder),
    )


def encode_attributes(attributes: Attributes) -> bytes:
    """Encode a sidecar canonically; same attributes, same bytes.

    Bits of a mode and extended attributes that a sidecar does not carry are left out. Paths and
    targets must have passed `path_problem` and `target_problem`.
    """
    for path in (*attributes.files, *attributes.links, *attributes.folders):
        assert path_problem(path) is None, path
    files = {
        path: {
            "mode": entry.mode & MODE_MASK,
            "mtimeNs": entry.mtime_ns,
            "sha256": entry.sha256,
            "xattrs": _encode_xattrs(entry.xattrs),
        }
        for path, entry in attributes.files.items()
    }
    folders = {
        path: {
            "empty": entry.empty,
            "mode": entry.mode & MODE_MASK,
            "xattrs": _encode_xattrs(entry.xattrs),
        }
        for path, entry in attributes.folders.items()
    }
    for path, target in attributes.links.items():
        assert target_problem(target) is None, path
    return canonical.encode(
        {
            "kind": KIND,
            "version": VERSION,
            "files": files,
            "links": dict(attributes.links),
            "folders": folders,
        }
    )


def _parse_map(document: dict[str, object], key: str, parse: Callable[[object], T]) -> dict[str, T]:
    found = document.get(key)
    if not isinstance(found, dict):
        raise _refused(f"`{key}` is not an object")
    for path in found:
        problem = path_problem(path)
        if problem is not None:
            raise _refused(f"a path in `{key}` {problem}")
    return {path: parse(value) for path, value in found.items()}


def _parse_entry(value: object) -> Entry:
    match value:
        case {"sha256": str() as digest, "mtimeNs": int() as mtime_ns, **rest}:
            mode, xattrs = _parse_common(rest)
        case _:
            raise _refused("a file's entry lacks a digest or a time")
    if not is_digest(digest) or isinstance(mtime_ns, bool) or mtime_ns not in _TIME_RANGE_NS:
        raise _refused("a file's entry has a wrong digest or time")
    return Entry(Digest(digest), mtime_ns, mode, xattrs)


def _parse_folder(value: object) -> FolderEntry:
    match value:
        case {"empty": bool() as empty, **rest}:
            mode, xattrs = _parse_common(rest)
            return FolderEntry(mode, xattrs, empty)
        case _:
            raise _refused("a folder's entry does not say whether it is empty")


def _parse_common(rest: dict[object, object]) -> tuple[int, dict[str, bytes]]:
    """Parse what files and folders share; no other key may be left."""
    mode = rest.pop("mode", None)
    encoded = rest.pop("xattrs", None)
    if rest:
        raise _refused("an entry has an unknown key")
    if type(mode) is not int or mode & ~MODE_MASK:
        raise _refused("an entry has a wrong mode")
    if not isinstance(encoded, dict):
        raise _refused("an entry's extended attributes are not an object")
    xattrs = {name: _parse_xattr_value(text) for name, text in encoded.items()}
    for name, value in xattrs.items():
        problem = _xattr_problem(name, value)
        if problem is not None:
            raise _refused(f"an extended attribute {problem}")
    return mode, xattrs


def _parse_xattr_value(text: object) -> bytes:
    if not isinstance(text, str):
        raise _refused("the value of an extended attribute is not a text")
    try:
        value = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _refused("the value of an extended attribute is not base64") from error
    if base64.b64encode(value).decode("ascii") != text:
        raise _refused("the value of an extended attribute is not canonical base64")
    return value


def _parse_target(value: object) -> str:
    if not isinstance(value, str):
        raise _refused("a link's target is not a text")
    problem = target_problem(value)
    if problem is not None:
        raise _refused(f"a link {problem}")
    return value


def _encode_xattrs(xattrs: Mapping[str, bytes]) -> dict[str, str]:
    carried = carried_xattrs(xattrs)
    return {name: base64.b64encode(value).decode("ascii") for name, value in carried.items()}


def _xattr_problem(name: str, value: bytes) -> str | None:
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    if not name.startswith(XATTR_NAMESPACE) or name == XATTR_NAMESPACE:
        return "is not of the namespace `user`"
    if length > MAX_XATTR_NAME_BYTES or "\0" in name:
        return "has a name that none can have"
    if len(value) > MAX_XATTR_VALUE_BYTES:
        return f"is longer than {MAX_XATTR_VALUE_BYTES:,} bytes"
    return None


def _refused(why: str) -> FormatError:
    return FormatError(
        f"The sidecar hpkfs/attributes.json is refused: {why}.",
        kept="The content of all files is unaffected.",
        next_step="Times, modes and links of this checkpoint are lost; the next one has them.",
    )
