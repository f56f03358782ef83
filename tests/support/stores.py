"""Stores that nobody designed: seeded, odd, and with everything known about their contents.

`make_store` writes a real store into a folder, as a `file://` address names it: a chain of
checkpoints by a program with other habits than ours. Names are non-ASCII, very long, look like
options or windows devices; pieces are uneven and have any extension; prefixes are foreign; a path
is a file and a folder at once; times have offsets. Every document and object obeys the format.

    expected = make_store(str(tmp_path / "store"), seed=7, files=200)
    expected.newest.visible["workspace/x"].data
"""

from __future__ import annotations

import random
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hpkfs.core.chunks import build_record
from hpkfs.core.documents import (
    HERMES_RUNTIME,
    FileRecord,
    Head,
    Piece,
    Reference,
    Runtime,
    Snapshot,
    TemplateOrigin,
    encode_head,
    encode_snapshot,
)
from hpkfs.core.ids import SnapshotId, make_id, sha256_hex
from hpkfs.core.limits import PIECE_SIZE, cap_for, max_pieces
from hpkfs.core.paths import DATABASE, PORTABLE, SOUL, fold, path_problem, to_local
from hpkfs.core.portable import DEFAULT, encode_portable

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_BYTES_MAX = 255  # NAME_MAX of Linux: a longer segment is in the store, never in a mount
SMALL_BYTES_MAX = 5_000
BIG_SIZES = (
    PIECE_SIZE,
    PIECE_SIZE + 1,
    PIECE_SIZE - 1,
    2 * PIECE_SIZE,
    2 * PIECE_SIZE + 12_345,
)
EXTENSIONS = ("md", "json", "bin", "chunk")
PREFIXES = (
    *("workspace/",) * 12,
    *("profile/skills/",) * 5,
    "foo/",
    "profile/plugins/",
    "profile/memories/",
    "hpkfs-not/",
)
CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789",
    "-_. +@#%&()[]{}=,;'!~^$`",
    ':*?"<>|',
    "äéüñßøÅœĲ",
    "日本語中文한글",
    "עבריתالعربية",
    "😀👩🏽🏳",
    "ก็ि\u0301\u0323",
    "\u200b\u200d\u200f\u2028\u00ad\u0085",
    "ﬁŉǰΐ",
)
SUFFIXES = ("", "", ".md", ".json", ".txt", ".py", ".MD", ".md.", ".tar.gz", ".sqlite3")
AWKWARD_NAMES = (
    "-rf",
    "--help",
    "$(touch x)",
    "%41%2f",
    "CON",
    "aux.txt",
    "...",
    "..a",
    ".md",
    "a b",
    "@0123456789abcdef0123456789abcdef",
    ".hpkfs",
    ".fuse_hidden0001",
    ".env",
    "state.db",
    "e" * NAME_BYTES_MAX,
    "é" * 127 + "x",
    "long" * 75,
    "/".join([*["deep" * 20] * 12, "z" * 42]),  # 1,024 bytes with its prefix
    "build/out.bin",
    ".git/config",
    "Folder/one",
    "folder/two",
)
UNCHANGING = (PORTABLE, DATABASE, SOUL, "workspace/exactly-")
TIMES = ("2026-01-02T03:{:02}:05Z", "2026-01-02T05:{:02}:05.123456789+02:00")


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """One file as the store holds it."""

    data: bytes
    executable: bool


@dataclass(frozen=True, slots=True)
class ExpectedCheckpoint:
    """One checkpoint; `files` by logical path, and its document as stored."""

    snapshot: Snapshot
    document: bytes
    files: Mapping[str, ExpectedFile]

    @property
    def reference(self) -> Reference:
        return Reference(self.snapshot.snapshot_id, sha256_hex(self.document))

    @property
    def visible(self) -> dict[str, ExpectedFile]:
        """What a mount shows as travelling files, by local path.

        Without config.yaml and state.db, which a mount makes for this machine, without a file
        whose path is a folder too, and without names that no Linux file system takes.
        """
        return {local: self.files[logical] for local, logical in visible_paths(self.files).items()}


@dataclass(frozen=True, slots=True)
class ExpectedStore:
    """A store in a folder; `checkpoints` oldest first."""

    root: str
    agent_id: str
    checkpoints: tuple[ExpectedCheckpoint, ...]

    @property
    def uri(self) -> str:
        return Path(self.root).absolute().as_uri()

    @property
    def newest(self) -> ExpectedCheckpoint:
        return self.checkpoints[-1]


def make_store(
    root: str,
    *,
    seed: int,
    files: int,
    checkpoints: int = 4,
    big_files: int = 2,
    agent_id: str = "demo",
    database: bytes | None = None,
    runtime: Runtime | None = None,
) -> ExpectedStore:
    """Write a store into `root` (made if absent); the same arguments give the same bytes.

    Args:
        root: the folder that becomes the store.
        seed: decides everything else.
        files: how many files the newest checkpoint has at least; the awkward ones come on top
            when there are 40 or more.
        checkpoints: length of the chain, 1 or more.
        big_files: how many files of about 1 or 2 MiB are invented at the most.
        agent_id: whose store it is.
        database: content of the conversation database; none when None.
        runtime: the runtime in every snapshot; None picks one per checkpoint.
    """
    maker = _Maker(random.Random(seed), big_files=big_files)
    if database is not None:
        maker.files[DATABASE] = ExpectedFile(database, executable=False)
    maker.files[PORTABLE] = ExpectedFile(encode_portable(DEFAULT), executable=False)
    maker.files[SOUL] = ExpectedFile("# Søul\n".encode(), executable=False)
    if files >= 40:
        maker.add_awkward()
    made: list[ExpectedCheckpoint] = []
    for number in range(checkpoints):
        if made:
            maker.change()
        while len(maker.files) < files * (number + 1) // checkpoints:
            maker.add_file()
        parent = made[-1].reference if made else None
        made.append(maker.checkpoint(number, agent_id=agent_id, parent=parent, runtime=runtime))
    store = ExpectedStore(root, agent_id, tuple(made))
    _write(store, maker.objects)
    return store


def visible_paths(files: Mapping[str, object]) -> dict[str, str]:
    """Map each local path that a mount shows as a travelling file to its logical path."""
    folders = {
        path[:index] for path in files for index, character in enumerate(path) if character == "/"
    }
    shown = {}
    for logical in files:
        local = to_local(logical)
        if local is None or logical in folders or logical in (PORTABLE, DATABASE):
            continue
        if all(len(segment.encode()) <= NAME_BYTES_MAX for segment in local.split("/")):
            shown[local] = logical
    return shown


class _Maker:
    """Invents files and remembers how each is stored; a kept file keeps its record."""

    def __init__(self, rng: random.Random, *, big_files: int) -> None:
        self.files: dict[str, ExpectedFile] = {}
        self.objects: dict[str, bytes] = {}
        self._rng = rng
        self._big_files_left = big_files
        self._folds: set[str] = set()
        self._steady: set[str] = set()
        self._records: dict[tuple[str, ExpectedFile], FileRecord] = {}

    def add_awkward(self) -> None:
        """Add one file for each name that has hurt some program; none of them is removed."""
        for name in AWKWARD_NAMES:
            self._set(f"workspace/{name}")
        self._set("workspace/both")
        self._set("workspace/both/below")
        self._set("workspace/both/deeper/still")
        self._set("profile/skills/both")
        self._set("profile/skills/both/SKILL.md")
        self._set("foo")
        self._set("foo/bar")
        for size in (0, 1, PIECE_SIZE, PIECE_SIZE + 1):
            self._set(f"workspace/exactly-{size}.bin", size=size)
        self._steady = set(self.files)

    def add_file(self) -> None:
        """Add a file with a new name that the format allows and that collides with none."""
        while True:
            path = self._path()
            if not self._taken(path):
                self._set(path)
                return

    def change(self) -> None:
        """Between two checkpoints: rewrite, append, remove, rename, and flip executable bits."""
        rng = self._rng
        movable = sorted(path for path in self.files if not path.startswith(UNCHANGING))
        for path in rng.sample(movable, len(movable) // 5):
            old = self.files[path]
            match rng.choice(("rewrite", "append", "remove", "flip", "rename")):
                case "rewrite":
                    self._set(path)
                case "append" if len(old.data) < cap_for(path) // 2:
                    self.files[path] = ExpectedFile(old.data + b"more\r\n", old.executable)
                case "flip":
                    self.files[path] = ExpectedFile(old.data, not old.executable)
                case "remove" if path not in self._steady:
                    del self.files[path]
                case "rename" if path not in self._steady and not self._taken(f"{path}-moved"):
                    self.files[f"{path}-moved"] = self.files.pop(path)
                    self._folds.add(fold(f"{path}-moved"))
                case _:
                    pass

    def checkpoint(
        self, number: int, *, agent_id: str, parent: Reference | None, runtime: Runtime | None
    ) -> ExpectedCheckpoint:
        rng = self._rng
        snapshot = Snapshot(
            kind="agent",
            owner_id=agent_id,
            name=rng.choice(("", 'Náme "q" \\ /\n')),
            snapshot_id=SnapshotId(make_id(rng.randbytes(16))),
            parent=parent,
            created_at=rng.choice(TIMES).format(number % 60),
            device_id=make_id(rng.randbytes(16)),
            runtime=runtime or rng.choice((HERMES_RUNTIME, Runtime("", "9", "any-\U0001f600"))),
            last_session_id=rng.choice((None, "20260102_030405_ab12cd")),
            template=rng.choice((None, self._template())),
            description="",
            files={path: self._record(path, file) for path, file in self.files.items()},
        )
        return ExpectedCheckpoint(snapshot, encode_snapshot(snapshot), dict(self.files))

    def _template(self) -> TemplateOrigin:
        return TemplateOrigin(
            url="pubky://somebody/template",
            snapshot_id=SnapshotId(make_id(self._rng.randbytes(16))),
            sha256=sha256_hex(b"template"),
            adopted_at="2025-12-31T23:59:59Z",
            managed_paths={SOUL: sha256_hex(b"soul"), "workspace/gone.md": sha256_hex(b"gone")},
        )

    def _path(self) -> str:
        rng = self._rng
        if self.files and rng.random() < 0.3:
            prefix = rng.choice(sorted(self.files)).rpartition("/")[0] + "/"
        else:
            prefix = rng.choice(PREFIXES) + "".join(
                f"{self._name()}/" for _ in range(rng.choice((0, 0, 1, 1, 2, 5)))
            )
        path = prefix + self._name() + rng.choice(SUFFIXES)
        return unicodedata.normalize("NFC", path)

    def _name(self) -> str:
        rng = self._rng
        pools = rng.choices(CHARACTERS, weights=(30, 4, 2, 8, 8, 4, 4, 3, 2, 2), k=2)
        letters = "".join(pools) + CHARACTERS[0][: rng.randrange(26)]
        return "".join(rng.choice(letters) for _ in range(rng.choice((1, 2, 5, 9, 30))))

    def _taken(self, path: str) -> bool:
        return path_problem(path) is not None or fold(path) in self._folds

    def _set(self, path: str, *, size: int | None = None) -> None:
        rng = self._rng
        size = self._size() if size is None else size
        data = rng.randbytes(min(size, cap_for(path)))
        if size and rng.random() < 0.2 and size < SMALL_BYTES_MAX:
            data = b"the same in many files\n"
        self.files[path] = ExpectedFile(data, executable=rng.random() < 0.2)
        self._folds.add(fold(path))

    def _size(self) -> int:
        if self._big_files_left and self._rng.random() < 0.05:
            self._big_files_left -= 1
            return self._rng.choice(BIG_SIZES)
        choices = (0, 1, 2, 100, self._rng.randrange(SMALL_BYTES_MAX), SMALL_BYTES_MAX)
        return self._rng.choice(choices)

    def _record(self, path: str, file: ExpectedFile) -> FileRecord:
        """Store a file, at first sight of path and content; later it keeps its record."""
        known = self._records.get((path, file))
        if known is None:
            known, objects = self._store(path, file)
            self._records[path, file] = known
            self.objects.update(objects)
        return known

    def _store(self, path: str, file: ExpectedFile) -> tuple[FileRecord, dict[str, bytes]]:
        if len(file.data) < 2 or self._rng.random() < 0.6:
            return build_record(path, file.data, executable=file.executable)
        pieces = []
        objects = {}
        for content in self._uneven(path, file.data):
            piece = Piece(sha256_hex(content), len(content), self._rng.choice(EXTENSIONS))
            pieces.append(piece)
            objects[piece.object] = content
        return (
            FileRecord(sha256_hex(file.data), len(file.data), file.executable, tuple(pieces)),
            objects,
        )

    def _uneven(self, path: str, data: bytes) -> list[bytes]:
        """Cut data of two bytes or more as nobody would, within the pieces that the path allows."""
        necessary = range(PIECE_SIZE - 1, len(data), PIECE_SIZE - 1)
        most = min(max_pieces(cap_for(path)) - 1 - len(necessary), len(data) - 1, 5)
        cuts = self._rng.sample(range(1, len(data)), self._rng.randint(0, most))
        edges = [0, *sorted({*cuts, *necessary}), len(data)]
        return [data[start:end] for start, end in pairwise(edges)]


def _write(store: ExpectedStore, objects: Mapping[str, bytes]) -> None:
    root = Path(store.root)
    for folder in ("objects", "snapshots"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, data in objects.items():
        (root / name).write_bytes(data)
    for checkpoint in store.checkpoints:
        name = f"snapshots/{checkpoint.snapshot.snapshot_id}.json"
        (root / name).write_bytes(checkpoint.document)
    orphan = b"no snapshot names this object"
    (root / f"objects/{sha256_hex(orphan)}.bin").write_bytes(orphan)
    newest = store.newest.reference
    head = Head("agent", store.agent_id, newest.snapshot_id, newest.sha256)
    (root / "head.json").write_bytes(encode_head(head))
