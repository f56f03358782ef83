"""Folders that are not in the volume: `.hpkfs/` with status and history, and read-only mounts.

A checkpoint is shown as a tree whose names come from its snapshot and whose bytes are fetched,
verified and cached when read; nothing here is ever written. Called by `fuse.py`; built by
`mount.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachetools import LRUCache

from hpkfs.core import config
from hpkfs.core.chunks import starts
from hpkfs.core.ids import timestamp_ns
from hpkfs.core.paths import to_local
from hpkfs.refresher import CONFIG, Loaded, default_mode, visible_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hpkfs.core.documents import FileRecord
    from hpkfs.objects import ObjectStore

FIRST_INO = 1 << 48
ROOT_INO = 1
CONTROL_NAME = b".hpkfs"
CACHE_S = 86_400.0
PIECES_IN_MEMORY_MAX = 16
HISTORY_DIRECT_MAX = 200

Children = dict[bytes, int]


@dataclass(slots=True)
class Node:
    """One virtual inode; the fields are named as those of `Inode`.

    `load` fills the children of a folder when it is first entered. `content` makes the bytes of a
    file that is written anew at each open, as the status is.
    """

    ino: int
    mode: int
    parent: int
    name: bytes
    mtime_ns: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    target: bytes | None = None
    record: FileRecord | None = None
    data: bytes | None = None
    content: Callable[[], bytes] | None = None
    children: Children | None = None
    load: Callable[[Node], Awaitable[None]] | None = None
    cache_s: float = CACHE_S

    @property
    def atime_ns(self) -> int:
        """Reading leaves no trace: the time of the checkpoint."""
        return self.mtime_ns

    @property
    def ctime_ns(self) -> int:
        """A checkpoint never changes: its own time."""
        return self.mtime_ns


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One checkpoint of the history folder."""

    name: str
    created_at: str
    load: Callable[[], Awaitable[Loaded]]


@dataclass
class VirtualTree:
    """The virtual inodes of one mount.

    `root` is set for a read-only mount of one checkpoint: then inode 1 is that checkpoint's root.
    """

    objects: ObjectStore
    state_folder: str
    uid: int
    gid: int
    started_ns: int
    status: Callable[[], bytes]
    history: Callable[[], Awaitable[list[HistoryEntry]]]
    byte_state: Callable[[int, bytes], bytes | None]
    show_history: bool = False
    _nodes: dict[int, Node] = field(default_factory=dict)
    _next: int = FIRST_INO
    _pieces: LRUCache[str, bytes] = field(
        default_factory=lambda: LRUCache(maxsize=PIECES_IN_MEMORY_MAX)
    )
    _status_text: dict[int, bytes] = field(default_factory=dict)
    _totals: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Make `.hpkfs/` and what is always in it."""
        control = self._folder(ROOT_INO, CONTROL_NAME, self.started_ns)
        control.children = {}
        status = self._add(control, b"status.json", stat.S_IFREG | 0o444, self.started_ns)
        status.content, status.cache_s = self.status, 0.0
        history = self._folder(control.ino, b"history", self.started_ns)
        history.load, history.cache_s = self._load_history, 1.0
        control.children[b"history"] = history.ino
        self._control = control.ino

    # -- what fuse.py asks ----------------------------------------------------------------

    def owns(self, parent: int, name: bytes) -> bool:
        """Whether a name in a real folder is ours."""
        return parent == ROOT_INO and name == CONTROL_NAME

    def listed(self, parent: int) -> list[tuple[bytes, int]]:
        """Our names in a real folder's listing."""
        if parent == ROOT_INO and self.show_history:
            return [(CONTROL_NAME, self._control)]
        return []

    def get(self, ino: int) -> Node:
        """A node by number; a file with changing content is measured now."""
        node = self._nodes.get(ino)
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if node.content is not None:
            node.size = len(node.content())
        return node

    async def lookup(self, parent: int, name: bytes) -> Node:
        """A node by name."""
        if self.owns(parent, name):
            return self._nodes[self._control]
        children = await self._children(self.get(parent))
        if name not in children:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.get(children[name])

    async def list_folder(self, ino: int) -> list[tuple[bytes, int]]:
        """Names and numbers in a folder."""
        return [*self.listed(ino), *(await self._children(self.get(ino))).items()]

    def open(self, ino: int) -> bool:
        """Open a file; returns whether its bytes never change."""
        node = self.get(ino)
        if stat.S_ISDIR(node.mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return node.content is None

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """Bytes of a file, fetched where needed."""
        node = self.get(ino)
        if node.content is not None:
            if offset == 0 or ino not in self._status_text:
                self._status_text[ino] = node.content()
            return self._status_text[ino][offset : offset + size]
        if node.data is not None:
            return node.data[offset : offset + size]
        if node.record is None:
            return b""
        parts: list[bytes] = []
        end = min(offset + size, node.size)
        for piece, start in zip(node.record.pieces, starts(node.record), strict=True):
            if start >= end:
                break
            if start + piece.size <= offset:
                continue
            data = self._pieces.get(piece.sha256)
            if data is None:
                data = await self.objects.get(piece)
                self._pieces[piece.sha256] = data
            parts.append(data[max(offset - start, 0) : end - start])
        return b"".join(parts)

    def totals(self) -> tuple[int, int]:
        """Number and bytes of the files of a read-only mount's checkpoint."""
        return self._totals

    def statvfs(self) -> os.statvfs_result:
        """The disk that holds the state directory."""
        return os.statvfs(self.state_folder)

    async def xattr(self, ino: int, name: bytes) -> bytes | None:
        """`user.hpkfs.*` of any inode."""
        if not name.startswith(b"user.hpkfs."):
            return None
        node = self._nodes.get(ino)
        if node is None:
            return self.byte_state(ino, name.removeprefix(b"user.hpkfs."))
        if name == b"user.hpkfs.state":
            return b"published"
        if name == b"user.hpkfs.sha256" and node.record is not None:
            return node.record.sha256.encode()
        return None

    # -- trees ----------------------------------------------------------------------------

    def show_checkpoint(self, loaded: Loaded) -> None:
        """Make inode 1 the root of a checkpoint."""
        root = Node(
            ROOT_INO, stat.S_IFDIR | 0o555, ROOT_INO, b"", self._time(loaded), uid=self.uid,
            gid=self.gid, nlink=2, children={},
        )  # fmt: skip
        self._nodes[ROOT_INO] = root
        self._fill(root, loaded)
        files = [node for node in self._nodes.values() if node.record is not None]
        self._totals = len(files), sum(node.size for node in files)

    async def _children(self, node: Node) -> Children:
        if not stat.S_ISDIR(node.mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if node.load is not None and (node.children is None or not node.cache_s > 1.0):
            await node.load(node)
        return node.children or {}

    async def _load_history(self, node: Node) -> None:
        """List the checkpoints: the newest ones directly, the rest below `older/`."""
        entries = await self.history()
        children = dict(node.children or {})
        for entry in entries[:HISTORY_DIRECT_MAX]:
            self._add_checkpoint(node, children, entry)
        if len(entries) > HISTORY_DIRECT_MAX:
            name = b"older"
            older = (
                self._nodes[children[name]]
                if name in children
                else self._folder(node.ino, name, node.mtime_ns)
            )
            children[name] = older.ino
            below = dict(older.children or {})
            for entry in entries[HISTORY_DIRECT_MAX:]:
                self._add_checkpoint(older, below, entry)
            older.children = below
        wanted = {os.fsencode(entry.name) for entry in entries[:HISTORY_DIRECT_MAX]} | {b"older"}
        node.children = {name: ino for name, ino in children.items() if name in wanted}

    def _add_checkpoint(self, folder: Node, children: Children, entry: HistoryEntry) -> None:
        name = os.fsencode(entry.name)
        if name in children:
            return
        node = self._folder(folder.ino, name, timestamp_ns(entry.created_at))

        async def load(node: Node) -> None:
            if node.children is None:
                loaded = await entry.load()
                node.children = {}
                self._fill(node, loaded)

        node.load = load
        children[name] = node.ino

    def _fill(self, root: Node, loaded: Loaded) -> None:
        """Build the tree of one checkpoint below a folder."""
        time_ns = self._time(loaded)
        folders: dict[str, Node] = {"": root}

        def folder(path: str) -> Node:
            known = folders.get(path)
            if known is not None:
                return known
            above = folder(path.rpartition("/")[0])
            made = self._folder(above.ino, os.fsencode(path.rpartition("/")[2]), time_ns)
            made.children = {}
            assert above.children is not None, "made above"
            above.children[made.name] = made.ino
            above.nlink += 1
            folders[path] = made
            return made

        for logical in loaded.attributes.folders:
            local = to_local(logical + "/x")
            if local is not None:
                folder(local[:-2])
        for local, (logical, record) in visible_files(loaded.snapshot).items():
            self._fill_file(folder(local.rpartition("/")[0]), local, logical, record, loaded)
        for logical, target in loaded.attributes.links.items():
            local = to_local(logical)
            if local is not None:
                place = folder(local.rpartition("/")[0])
                name = os.fsencode(local.rpartition("/")[2])
                link = self._add(place, name, stat.S_IFLNK | 0o777, time_ns)
                link.target = os.fsencode(target)
                link.size = len(link.target)
        if loaded.portable is not None:
            made = self._add(root, os.fsencode(CONFIG), stat.S_IFREG | 0o444, time_ns)
            made.data = config.merge("", loaded.portable, None).encode()
            made.size = len(made.data)

    def _fill_file(
        self, place: Node, local: str, logical: str, record: FileRecord, loaded: Loaded
    ) -> None:
        entry = loaded.attributes.files.get(logical)
        mode = default_mode(local, folder=False, executable=record.executable)
        time_ns = self._time(loaded)
        if entry is not None and entry.sha256 == record.sha256:
            mode, time_ns = entry.mode, entry.mtime_ns
        name = os.fsencode(local.rpartition("/")[2])
        node = self._add(place, name, stat.S_IFREG | (mode & 0o555), time_ns)
        node.record, node.size = record, record.size

    def _time(self, loaded: Loaded) -> int:
        return timestamp_ns(loaded.snapshot.created_at)

    def _folder(self, parent: int, name: bytes, time_ns: int) -> Node:
        node = self._make(parent, name, stat.S_IFDIR | 0o555, time_ns)
        node.nlink = 2
        return node

    def _add(self, place: Node, name: bytes, mode: int, time_ns: int) -> Node:
        node = self._make(place.ino, name, mode, time_ns)
        assert place.children is not None, "its children are being filled"
        place.children[name] = node.ino
        return node

    def _make(self, parent: int, name: bytes, mode: int, time_ns: int) -> Node:
        node = Node(self._next, mode, parent, name, time_ns, uid=self.uid, gid=self.gid)
        self._nodes[node.ino] = node
        self._next += 1
        return node
