"""The documents of a store: heads and snapshots, for agents and templates.

Callers get frozen values that obey every rule of the format, because `parse_head` and
`parse_snapshot` refuse all else; `encode_head` and `encode_snapshot` write them canonically with
every key, so that the other v2 program finds the digest it computes itself. A record that we did
not touch goes out as it came in, whatever its pieces and extensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from hpkfs.core import limits
from hpkfs.core.canonical import decode, encode, refusal
from hpkfs.core.ids import (
    EMPTY_DIGEST,
    AgentId,
    DeviceId,
    Digest,
    SnapshotId,
    check_timestamp,
    is_agent_id,
    is_digest,
    is_hex32,
    sha256_hex,
)
from hpkfs.core.paths import AGENTS, PORTABLE, SKILLS, SOUL, fold, path_problem
from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["agent", "template"]
SCHEMA_VERSION: Final = 2

_HEAD: Final = "The head"
_SNAPSHOT: Final = "The snapshot"
OBJECT_NAME: Final = re.compile(r"objects/([0-9a-f]{64})\.(md|json|bin|chunk)")
_RECORD_KEYS: Final = frozenset({"sha256", "size", "executable", "pieces"})
_RECORD_REQUIRED: Final = frozenset({"sha256", "size", "pieces"})
_PIECE_KEYS: Final = frozenset({"object", "sha256", "size"})
_TEMPLATE_FILES: Final = frozenset({SOUL, AGENTS, PORTABLE})
_COMMON_REQUIRED: Final = ("schemaVersion", "kind", "snapshotId", "createdAt", "runtime")
_COMMON_OPTIONAL: Final = ("name", "parent", "files")


@dataclass(frozen=True, slots=True)
class Piece:
    """A consecutive part of a file, stored as one object.

    Attributes:
        sha256: digest of the piece's bytes.
        size: length in bytes, 1 to 1 MiB.
        extension: `md`, `json`, `bin` or `chunk`; part of the object's name, says nothing.
    """

    sha256: Digest
    size: int
    extension: str

    @property
    def object(self) -> str:
        """The object's name, relative to its store."""
        return f"objects/{self.sha256}.{self.extension}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a snapshot says of one file; `pieces` are in file order and may be cut in any way.

    Attributes:
        sha256: digest of the whole file.
        size: length of the whole file in bytes.
        executable: the owner-execute bit.
        pieces: none if the file is empty.
    """

    sha256: Digest
    size: int
    executable: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Names one snapshot and the digest of its bytes as stored."""

    snapshot_id: SnapshotId
    sha256: Digest


@dataclass(frozen=True, slots=True)
class Runtime:
    """The program whose conversations a snapshot holds."""

    name: str
    version: str
    adapter: str


HERMES_RUNTIME: Final = Runtime("hermes", "0.19.0", "hermes-0.19-sqlite22-v1")


@dataclass(frozen=True, slots=True)
class TemplateOrigin:
    """The template that an agent adopted; `managed_paths` has its files' digests as adopted."""

    url: str
    snapshot_id: SnapshotId
    sha256: Digest
    adopted_at: str
    managed_paths: Mapping[str, Digest]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One checkpoint.

    Attributes:
        kind: an agent has a device, a last session and a template; a template a description.
        owner_id: the agent id, or the template id.
        created_at: the timestamp as text, as stored.
        device_id: the machine that made it; None in a template.
        files: logical path to record.
    """

    kind: Kind
    owner_id: str
    name: str
    snapshot_id: SnapshotId
    parent: Reference | None
    created_at: str
    device_id: str | None
    runtime: Runtime
    last_session_id: str | None
    template: TemplateOrigin | None
    description: str
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Head:
    """The one mutable document: which snapshot is current."""

    kind: Kind
    owner_id: str
    snapshot_id: SnapshotId
    sha256: Digest


def parse_head(data: bytes, *, owner_id: str | None = None, kind: Kind | None = None) -> Head:
    """Parse a head.

    Args:
        data: the document as stored.
        owner_id: the agent or template it must belong to; None accepts any.
        kind: what it must be the head of; None accepts both.

    Raises:
        FormatError: it breaks a rule of the format, or belongs to another agent.
    """
    document = decode(data, limit=limits.MAX_HEAD, what=_HEAD)
    found = _kind(document, "head", expected=kind, what=_HEAD)
    required = ("schemaVersion", "kind", "snapshotId", "sha256", f"{found}Id")
    fields = _Fields(document, _HEAD, required=required)
    return Head(
        found,
        fields.owner(f"{found}Id", expected=owner_id),
        fields.snapshot_id("snapshotId"),
        fields.digest("sha256"),
    )


def encode_head(head: Head) -> bytes:
    """Encode a head canonically."""
    return encode(
        {
            "schemaVersion": SCHEMA_VERSION,
            "kind": f"{head.kind}-head",
            f"{head.kind}Id": head.owner_id,
            "snapshotId": head.snapshot_id,
            "sha256": head.sha256,
        }
    )


def parse_snapshot(
    data: bytes,
    *,
    owner_id: str | None = None,
    kind: Kind | None = None,
    reference: Reference | None = None,
) -> Snapshot:
    """Parse a snapshot of an agent or a template.

    Args:
        data: the document as stored.
        owner_id: the agent or template it must belong to; None accepts any.
        kind: what it must be a snapshot of; None accepts both.
        reference: what named it, a head or a child; its id and digest must agree. None when the
            caller has checked them, or nothing names it.

    Raises:
        FormatError: it breaks a rule of the format, belongs to another agent, is its own parent,
            or is not the snapshot that `reference` names.
    """
    if reference is not None and sha256_hex(data) != reference.sha256:
        raise refusal(_SNAPSHOT, "its digest is not the one by which it was named")
    document = decode(data, limit=limits.MAX_SNAPSHOT, what=_SNAPSHOT)
    found = _kind(document, "snapshot", expected=kind, what=_SNAPSHOT)
    agent = found == "agent"
    fields = _Fields(
        document,
        _SNAPSHOT,
        required=(*_COMMON_REQUIRED, f"{found}Id", *(("deviceId",) if agent else ())),
        optional=(
            *_COMMON_OPTIONAL,
            *(("lastSessionId", "template") if agent else ("description",)),
        ),
    )
    snapshot_id = fields.snapshot_id("snapshotId")
    if reference is not None and snapshot_id != reference.snapshot_id:
        raise refusal(_SNAPSHOT, f"it has the id {snapshot_id}, not {reference.snapshot_id}")
    parent = _parent(document.get("parent"))
    if parent is not None and parent.snapshot_id == snapshot_id:
        raise refusal(_SNAPSHOT, "it names itself as its parent")
    return Snapshot(
        kind=found,
        owner_id=fields.owner(f"{found}Id", expected=owner_id),
        name=fields.text("name", most=limits.MAX_NAME_CHARACTERS, default=""),
        snapshot_id=snapshot_id,
        parent=parent,
        created_at=fields.timestamp("createdAt"),
        device_id=fields.device_id("deviceId") if agent else None,
        runtime=_runtime(document["runtime"]),
        last_session_id=_last_session(document.get("lastSessionId")),
        template=_template_origin(document.get("template")),
        description=fields.text("description", most=limits.MAX_DESCRIPTION_CHARACTERS, default=""),
        files=_files(document.get("files", {}), kind=found),
    )


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Encode a snapshot canonically, with every key; its digest is that of these bytes."""
    document: dict[str, object] = {
        "schemaVersion": SCHEMA_VERSION,
        "kind": f"{snapshot.kind}-snapshot",
        f"{snapshot.kind}Id": snapshot.owner_id,
        "name": snapshot.name,
        "snapshotId": snapshot.snapshot_id,
        "parent": _reference_to_json(snapshot.parent),
        "createdAt": snapshot.created_at,
        "runtime": {
            "name": snapshot.runtime.name,
            "version": snapshot.runtime.version,
            "adapter": snapshot.runtime.adapter,
        },
        "files": {path: record_to_json(record) for path, record in snapshot.files.items()},
    }
    if snapshot.kind == "agent":
        document["deviceId"] = snapshot.device_id
        document["lastSessionId"] = snapshot.last_session_id
        document["template"] = _template_origin_to_json(snapshot.template)
    else:
        document["description"] = snapshot.description
    return encode(document)


def record_to_json(record: FileRecord) -> dict[str, object]:
    """Give a record as it stands in a snapshot and in the journal."""
    return {
        "sha256": record.sha256,
        "size": record.size,
        "executable": record.executable,
        "pieces": [
            {"object": piece.object, "sha256": piece.sha256, "size": piece.size}
            for piece in record.pieces
        ],
    }


def record_from_json(value: object, *, path: str) -> FileRecord:
    """Parse one record, such as one kept in the journal.

    Args:
        value: the decoded JSON.
        path: names the file in an error; its own size limit is not applied, as it may be any name.

    Raises:
        FormatError: it breaks a rule of the format.
    """
    return _record(value, path=path, cap=limits.MAX_DATABASE)


class _Fields:
    """Takes the values of one JSON object, after its keys were compared with the format."""

    def __init__(
        self,
        value: object,
        what: str,
        *,
        required: tuple[str, ...],
        optional: tuple[str, ...] = (),
    ) -> None:
        if not isinstance(value, dict):
            raise refusal(what, "it is not a JSON object")
        missing = set(required) - value.keys()
        if missing:
            raise refusal(what, f"it lacks {_listed(missing)}")
        unknown = value.keys() - {*required, *optional}
        if unknown:
            raise refusal(what, f"nobody knows its {_listed(unknown)}")
        self._values: dict[str, object] = value
        self._what = what

    def text(self, key: str, *, most: int, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, "is not a text")
        if len(value) > most:
            self._refuse(key, f"is longer than {most:,} characters")
        return value

    def snapshot_id(self, key: str) -> SnapshotId:
        return SnapshotId(self._matching(key, is_hex32, "is not 32 lower-case hex digits"))

    def device_id(self, key: str) -> DeviceId:
        return DeviceId(self._matching(key, is_hex32, "is not 32 lower-case hex digits"))

    def digest(self, key: str) -> Digest:
        return Digest(self._matching(key, is_digest, "is not 64 lower-case hex digits"))

    def timestamp(self, key: str) -> str:
        return self._matching(key, _is_timestamp, "is not a date and time with a zone")

    def owner(self, key: str, *, expected: str | None) -> AgentId:
        found = self._matching(key, is_agent_id, "is not an id")
        if expected is not None and found != expected:
            raise refusal(self._what, f"it belongs to {found!r} and not to {expected!r}")
        return AgentId(found)

    def _matching(self, key: str, matches: Callable[[str], bool], problem: str) -> str:
        value = self._values[key]
        if not isinstance(value, str) or not matches(value):
            self._refuse(key, problem)
        return value

    def _refuse(self, key: str, problem: str) -> NoReturn:
        raise refusal(self._what, f"its {key} {problem}")


def _is_timestamp(text: str) -> bool:
    try:
        check_timestamp(text)
    except FormatError:
        return False
    return True


def _listed(keys: set[str]) -> str:
    return ", ".join(repr(key[:64]) for key in sorted(keys)[:5])


def _kind(document: dict[str, object], noun: str, *, expected: Kind | None, what: str) -> Kind:
    version = document.get("schemaVersion")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise refusal(what, f"its schemaVersion is not {SCHEMA_VERSION}")
    kinds: tuple[Kind, ...] = ("agent", "template") if expected is None else (expected,)
    for kind in kinds:
        if document.get("kind") == f"{kind}-{noun}":
            return kind
    raise refusal(what, "its kind is not " + " or ".join(f"{kind}-{noun}" for kind in kinds))


def _reference(value: object, what: str) -> Reference:
    fields = _Fields(value, what, required=("snapshotId", "sha256"))
    return Reference(fields.snapshot_id("snapshotId"), fields.digest("sha256"))


def _parent(value: object) -> Reference | None:
    return None if value is None else _reference(value, "The parent in the snapshot")


def _runtime(value: object) -> Runtime:
    fields = _Fields(value, "The runtime in the snapshot", required=("name", "version", "adapter"))
    return Runtime(
        fields.text("name", most=limits.MAX_RUNTIME_CHARACTERS),
        fields.text("version", most=limits.MAX_RUNTIME_CHARACTERS),
        fields.text("adapter", most=limits.MAX_ADAPTER_CHARACTERS),
    )


def _last_session(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= limits.MAX_SESSION_CHARACTERS:
        raise refusal(
            _SNAPSHOT,
            f"its lastSessionId is not a text of 1 to {limits.MAX_SESSION_CHARACTERS} characters",
        )
    return value


def _template_origin(value: object) -> TemplateOrigin | None:
    if value is None:
        return None
    what = "The template origin in the snapshot"
    fields = _Fields(
        value,
        what,
        required=("url", "snapshotId", "sha256", "adoptedAt"),
        optional=("managedPaths",),
    )
    managed = value.get("managedPaths", {}) if isinstance(value, dict) else {}
    if not isinstance(managed, dict) or len(managed) > limits.MAX_FILES:
        raise refusal(what, f"its managedPaths are not an object of at most {limits.MAX_FILES:,}")
    for path in managed:
        problem = path_problem(path)
        if problem is not None:
            raise refusal(what, f"the managed path {path[:100]!r} {problem}")
    digests = _Fields(managed, what, required=tuple(managed))
    return TemplateOrigin(
        url=fields.text("url", most=limits.MAX_URL_CHARACTERS),
        snapshot_id=fields.snapshot_id("snapshotId"),
        sha256=fields.digest("sha256"),
        adopted_at=fields.timestamp("adoptedAt"),
        managed_paths={path: digests.digest(path) for path in managed},
    )


def _reference_to_json(reference: Reference | None) -> dict[str, object] | None:
    if reference is None:
        return None
    return {"snapshotId": reference.snapshot_id, "sha256": reference.sha256}


def _template_origin_to_json(origin: TemplateOrigin | None) -> dict[str, object] | None:
    if origin is None:
        return None
    return {
        "url": origin.url,
        "snapshotId": origin.snapshot_id,
        "sha256": origin.sha256,
        "adoptedAt": origin.adopted_at,
        "managedPaths": dict(origin.managed_paths),
    }


def _files(value: object, *, kind: Kind) -> dict[str, FileRecord]:
    if not isinstance(value, dict):
        raise refusal(_SNAPSHOT, "its files are not an object")
    if len(value) > limits.MAX_FILES:
        raise refusal(_SNAPSHOT, f"it holds more than {limits.MAX_FILES:,} files")
    files: dict[str, FileRecord] = {}
    for path, record in value.items():
        problem = path_problem(path)
        if problem is not None:
            raise refusal(_SNAPSHOT, f"the path {path[:100]!r} {problem}")
        if kind == "template" and path not in _TEMPLATE_FILES and not path.startswith(SKILLS):
            raise refusal(_SNAPSHOT, f"a template may not hold {path[:100]!r}")
        files[path] = _record(record, path=path, cap=limits.cap_for(path))
    if sum(record.size for record in files.values()) > limits.MAX_TOTAL:
        raise refusal(_SNAPSHOT, f"its files have more than {limits.MAX_TOTAL:,} bytes in all")
    _check_collisions(files)
    _check_object_sizes(files)
    return files


def _check_collisions(files: Mapping[str, FileRecord]) -> None:
    seen: dict[str, str] = {}
    for path in files:
        first = seen.setdefault(fold(path), path)
        if first is not path:
            raise refusal(_SNAPSHOT, f"the paths {first[:100]!r} and {path[:100]!r} collide")


def _check_object_sizes(files: Mapping[str, FileRecord]) -> None:
    sizes: dict[tuple[str, str], int] = {}
    for path, record in files.items():
        for piece in record.pieces:
            if sizes.setdefault((piece.sha256, piece.extension), piece.size) != piece.size:
                raise refusal(_SNAPSHOT, f"an object of {path[:100]!r} has two sizes in it")


def _record(value: object, *, path: str, cap: int) -> FileRecord:
    # Runs up to 5,000 times for one snapshot, so the checks are inline.
    if not isinstance(value, dict) or not _RECORD_REQUIRED <= value.keys() <= _RECORD_KEYS:
        raise _bad_record(path, "it has not the keys of a file record")
    digest, size, pieces = value["sha256"], value["size"], value["pieces"]
    executable = value.get("executable", False)
    if type(size) is not int or not 0 <= size <= cap:
        raise _bad_record(path, f"its size is not an integer from 0 to {cap:,}")
    if not isinstance(executable, bool):
        raise _bad_record(path, "its executable bit is neither true nor false")
    if not isinstance(pieces, list) or len(pieces) > limits.max_pieces(cap):
        raise _bad_record(path, f"its pieces are not a list of at most {limits.max_pieces(cap)}")
    if not isinstance(digest, str) or not is_digest(digest):
        raise _bad_record(path, "its sha256 is not 64 lower-case hex digits")
    found = tuple(_piece(piece, path) for piece in pieces)
    record = FileRecord(Digest(digest), size, executable, found)
    _check_whole(record, path)
    return record


def _check_whole(record: FileRecord, path: str) -> None:
    pieces = record.pieces
    if sum(piece.size for piece in pieces) != record.size:
        raise _bad_record(path, "the sizes of its pieces do not add up to its size")
    if not pieces and record.sha256 != EMPTY_DIGEST:
        raise _bad_record(path, "it is empty, but its sha256 is not that of no bytes")
    if len(pieces) == 1 and pieces[0].sha256 != record.sha256:
        raise _bad_record(path, "its only piece has another sha256")


def _piece(value: object, path: str) -> Piece:
    if not isinstance(value, dict) or value.keys() != _PIECE_KEYS:
        raise _bad_record(path, "a piece has not the keys of a piece")
    name, size = value["object"], value["size"]
    match = OBJECT_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise _bad_record(path, "a piece's object is not a digest with an extension")
    digest, extension = match.groups()
    if value["sha256"] != digest:
        raise _bad_record(path, "a piece's sha256 is not the one in its object's name")
    if type(size) is not int or not 1 <= size <= limits.PIECE_SIZE:
        raise _bad_record(path, f"a piece's size is not an integer from 1 to {limits.PIECE_SIZE:,}")
    return Piece(Digest(digest), size, extension)


def _bad_record(path: str, problem: str) -> FormatError:
    return refusal(f"The file record of {path[:100]!r}", problem)
