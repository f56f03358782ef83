"""The store's checkpoint becomes the tree: the first install, and the switch to a newer head.

Called by `mount.py` before the kernel mount and on `sync`. An install is one journal transaction:
after a crash the tree is wholly the old checkpoint or wholly the new one. A file that changes
gets a new inode, so a process that holds the old one open keeps its version.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpkfs.core import attributes as sidecar
from hpkfs.core import config
from hpkfs.core.documents import Reference, Snapshot, parse_snapshot
from hpkfs.core.ids import timestamp_ns
from hpkfs.core.paths import PORTABLE, SIDECAR, START, to_local
from hpkfs.core.portable import Portable, encode_portable, parse_portable
from hpkfs.core.start import MAX_START, Profile, parse_start
from hpkfs.errors import BusyError, FormatError, IntegrityError
from hpkfs.inodes import ABSENT, ROOT_INO, Inode
from hpkfs.journal import META_BASE, Checkpoint
from hpkfs.volume import Replaced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpkfs.core.documents import FileRecord
    from hpkfs.journal import Journal
    from hpkfs.objects import ObjectStore
    from hpkfs.volume import Volume

log = logging.getLogger(__name__)

NAME_BYTES_MAX = 255
DATABASE = "state.db"
DATABASE_FILES = (b"state.db", b"state.db-wal", b"state.db-shm", b"state.db-journal")
CONFIG = "config.yaml"
# Hermes keeps these at 0700 by itself; an equal start makes no checkpoint of its chmod.
PRIVATE_FOLDERS = ("memories", "skills")

META_ATTRIBUTES = "base_attributes"
META_PORTABLE = "base_portable"
META_START = "start_profile"
META_CONFIG = "config_sha256"
# Digest of the sealed conversation's rows; it belongs to the base's record of the database.
META_DATABASE_DIGEST = "database_digest"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint with the small documents that an install needs.

    `problems` are sentences for the log and for status: a damaged sidecar or settings document
    never stops an install.
    """

    snapshot: Snapshot
    document: bytes
    attributes: sidecar.Attributes
    portable: Portable | None
    problems: tuple[str, ...]
    start: Profile | None = None

    @property
    def reference(self) -> Reference:
        """Id and digest of the stored bytes."""
        digest = hashlib.sha256(self.document).hexdigest()
        return Reference(self.snapshot.snapshot_id, digest)  # type: ignore[arg-type]  # hex digest


async def load(objects: ObjectStore, reference: Reference, *, owner_id: str | None) -> Loaded:
    """Fetch and verify a snapshot and its small documents.

    Raises:
        IntegrityError: the snapshot is not what its digest says, or breaks the format.
        TransientError: the store did not answer.
    """
    snapshot, document = await objects.get_snapshot(reference, owner_id=owner_id)
    return await load_documents(objects, snapshot, document)


async def load_documents(objects: ObjectStore, snapshot: Snapshot, document: bytes) -> Loaded:
    """Fetch the sidecar and the settings that a snapshot names."""
    problems: list[str] = []
    attributes, portable = sidecar.EMPTY, None
    record = snapshot.files.get(SIDECAR)
    if record is not None:
        try:
            attributes = sidecar.parse_attributes(await read_record(objects, record))
        except FormatError as error:
            problems.append(f"The stored attributes cannot be read: {error.happened}")
    record = snapshot.files.get(PORTABLE)
    if record is not None:
        try:
            portable = parse_portable(await read_record(objects, record))
        except FormatError as error:
            problems.append(f"The stored settings cannot be read: {error.happened}")
    start = None
    record = snapshot.files.get(START)
    if record is not None and record.size <= MAX_START:
        try:
            start = parse_start(await read_record(objects, record))
        except IntegrityError as error:
            log.info("the start profile is not used: %s", error.happened)
    return Loaded(snapshot, document, attributes, portable, tuple(problems), start)


async def read_record(objects: ObjectStore, record: FileRecord) -> bytes:
    """The bytes of a small stored file."""
    return b"".join([await objects.get(piece) for piece in record.pieces])


def visible_files(snapshot: Snapshot) -> dict[str, tuple[str, FileRecord]]:
    """What of a snapshot is shown as files: local path -> (logical path, record).

    Left out, and carried forward: foreign prefixes, a path that is also a folder of another,
    names longer than a file system takes.
    """
    shown: dict[str, tuple[str, FileRecord]] = {}
    for logical, record in snapshot.files.items():
        local = to_local(logical)
        if local is None or local == CONFIG:
            continue
        if any(len(os.fsencode(part)) > NAME_BYTES_MAX for part in local.split("/")):
            continue
        shown[local] = (logical, record)
    folders: set[str] = set()
    for local in shown:
        while "/" in local:
            local = local.rpartition("/")[0]
            if local in folders:
                break
            folders.add(local)
    for folder in folders & shown.keys():
        del shown[folder]
    return shown


def default_mode(path: str, *, folder: bool, executable: bool = False) -> int:
    """Permission bits of what the sidecar says nothing about."""
    if folder:
        return 0o700 if path in PRIVATE_FOLDERS else 0o755
    return 0o755 if executable else 0o644


class Installer:
    """Writes checkpoints into the tree of one volume."""

    def __init__(self, volume: Volume, *, uid: int, gid: int) -> None:
        self._volume = volume
        self._journal: Journal = volume.journal
        self._uid = uid
        self._gid = gid
        self._base: tuple[Snapshot, bytes] | None = None

    def base(self) -> tuple[Snapshot, bytes] | None:
        """The checkpoint that the tree was last sealed as or installed from."""
        snapshot_id = self._journal.get_meta(META_BASE)
        if snapshot_id is None:
            return None
        if self._base is not None and self._base[0].snapshot_id == snapshot_id:
            return self._base
        document = self._journal.document(snapshot_id)
        if document is None:
            raise IntegrityError(
                f"The journal lost the document of its base checkpoint {snapshot_id}.",
                kept="The store and the files of this machine were not touched.",
                next_step="Run `hpkfs fsck` on the state directory.",
            )
        self._base = parse_snapshot(document), document
        return self._base

    def base_attributes(self) -> sidecar.Attributes:
        """The sidecar of the base."""
        text = self._journal.get_meta(META_ATTRIBUTES)
        return sidecar.EMPTY if text is None else sidecar.parse_attributes(text.encode())

    def base_portable(self) -> Portable | None:
        """The settings of the base; None when it has none."""
        text = self._journal.get_meta(META_PORTABLE)
        return None if text is None else parse_portable(text.encode())

    def make_root(self) -> None:
        """Make the root folder of a new journal."""
        if self._journal.load(ROOT_INO) is None:
            self._journal.insert(self._new_inode(ROOT_INO, stat.S_IFDIR | 0o700, time.time_ns()))

    def install(self, loaded: Loaded, *, state: str = "published") -> list[Replaced]:
        """Make the tree show a checkpoint; local files stay. Nothing may be dirty.

        Returns:
            The names whose inodes changed.

        Raises:
            BusyError: a process holds the conversation database open.
        """
        old = self.base()
        old_files = visible_files(old[0]) if old else {}
        new_files = visible_files(loaded.snapshot)
        created_ns = timestamp_ns(loaded.snapshot.created_at)
        with self._journal.transaction():
            if old is None:
                replaced: list[Replaced] = []
                self._populate(new_files, loaded.attributes, created_ns)
            else:
                replaced = self._switch(old_files, new_files, loaded.attributes, created_ns)
            self._install_links(loaded.attributes, replaced, created_ns)
            self._install_folders(loaded.attributes, created_ns)
            self._remember(loaded, state)
        return replaced

    def _remember(self, loaded: Loaded, state: str) -> None:
        snapshot, reference = loaded.snapshot, loaded.reference
        parent = snapshot.parent
        self._journal.set_meta(META_DATABASE_DIGEST, None)
        self._journal.set_meta(
            META_ATTRIBUTES, sidecar.encode_attributes(loaded.attributes).decode()
        )
        if loaded.portable is not None:
            self._journal.set_meta(META_PORTABLE, encode_portable(loaded.portable).decode())
        self._journal.add_checkpoint(
            checkpoint_row(snapshot, reference.sha256, parent, state), loaded.document
        )
        self._journal.set_base(snapshot.snapshot_id)
        self._base = snapshot, loaded.document
        if loaded.start is not None:
            self._journal.set_json(META_START, loaded.start)

    # -- the first install ----------------------------------------------------------------

    def _populate(
        self,
        files: Mapping[str, tuple[str, FileRecord]],
        attributes: sidecar.Attributes,
        created_ns: int,
    ) -> None:
        """Insert a whole tree at once."""
        inodes: list[Inode] = []
        dentries: list[tuple[int, bytes, int]] = []
        folders: dict[str, int] = {"": ROOT_INO}
        links: dict[int, int] = {}
        made: dict[int, Inode] = {}

        def folder(path: str) -> int:
            known = folders.get(path)
            if known is not None:
                return known
            above, _, name = path.rpartition("/")
            parent = folder(above)
            mode = stat.S_IFDIR | default_mode(path, folder=True)
            inode = self._new_inode(self._journal.new_ino(), mode, created_ns)
            inode.parent, inode.name = parent, os.fsencode(name)
            folders[path] = inode.ino
            made[inode.ino] = inode
            links[parent] = links.get(parent, 0) + 1
            inodes.append(inode)
            dentries.append((parent, inode.name, inode.ino))
            return inode.ino

        for local in sorted(files):
            logical, record = files[local]
            above, _, name = local.rpartition("/")
            inode = self._file_inode(logical, record, attributes, created_ns)
            inode.parent, inode.name = folder(above), os.fsencode(name)
            inodes.append(inode)
            dentries.append((inode.parent, inode.name, inode.ino))
        for ino, count in links.items():
            if ino == ROOT_INO:
                root = self._volume.get(ROOT_INO)
                root.nlink += count
                self._journal.update(ROOT_INO, nlink=root.nlink)
            else:
                made[ino].nlink += count
        self._journal.bulk_insert(inodes, dentries)

    def _file_inode(
        self,
        logical: str,
        record: FileRecord,
        attributes: sidecar.Attributes,
        created_ns: int,
        *,
        ino: int | None = None,
    ) -> Inode:
        entry = attributes.files.get(logical)
        mode, mtime_ns = (
            default_mode(logical, folder=False, executable=record.executable),
            created_ns,
        )
        if entry is not None and entry.sha256 == record.sha256:
            mode, mtime_ns = entry.mode & 0o777, entry.mtime_ns
            if bool(mode & 0o100) != record.executable:
                mode = mode | 0o100 if record.executable else mode & ~0o111
        number = self._journal.new_ino() if ino is None else ino
        inode = self._new_inode(number, stat.S_IFREG | mode, mtime_ns)
        inode.size = record.size
        inode.base_mtime_ns, inode.base_mode = mtime_ns, mode
        inode.set_record(record, bytearray([ABSENT]) * len(record.pieces))
        inode.dirty = 0
        inode.stale = False
        if entry is not None:
            for name, value in entry.xattrs.items():
                self._journal.set_xattr(number, os.fsencode(name), value)
        return inode

    def _new_inode(self, ino: int, mode: int, time_ns: int) -> Inode:
        nlink = 2 if stat.S_ISDIR(mode) else 1
        return Inode(
            (
                ino, mode, self._uid, self._gid, 0, nlink, 0, time_ns, time_ns, time_ns,
                None, None, None, 0, None, None, None, None,
            )
        )  # fmt: skip

    # -- the switch to another checkpoint -------------------------------------------------

    def _switch(
        self,
        old: Mapping[str, tuple[str, FileRecord]],
        new: Mapping[str, tuple[str, FileRecord]],
        attributes: sidecar.Attributes,
        created_ns: int,
    ) -> list[Replaced]:
        replaced: list[Replaced] = []
        previous = self.base_attributes()
        if old.get(DATABASE) != new.get(DATABASE):
            self._drop_database(replaced)
        for local in sorted(old.keys() - new.keys()):
            if local != DATABASE:
                self._remove(local, replaced)
        for local in sorted(new):
            logical, record = new[local]
            same_entry = previous.files.get(logical) == attributes.files.get(logical)
            if old.get(local) == new[local] and same_entry:
                continue
            self._replace_file(local, logical, record, attributes, created_ns, replaced)
        for link in sorted(previous.links.keys() - attributes.links.keys()):
            local_link = to_local(link)
            if local_link is not None:
                self._remove_link(local_link, previous.links[link], replaced)
        return replaced

    def _drop_database(self, replaced: list[Replaced]) -> None:
        """The database goes with its sidecars, or a stale `-wal` would be replayed into the new."""
        names = []
        for name in DATABASE_FILES:
            ino = self._journal.lookup(ROOT_INO, name)
            if ino is None:
                continue
            if self._volume.is_open(ino):
                raise BusyError(
                    "The conversation database is open.",
                    kept="Nothing was replaced.",
                    next_step="End the agent on this mount, then try again.",
                )
            names.append((name, ino))
        for name, ino in names:
            self._volume.detach_name(ROOT_INO, name)
            replaced.append(Replaced(ROOT_INO, name, ino))

    def _remove(self, local: str, replaced: list[Replaced]) -> None:
        parent = self._find_folder(local.rpartition("/")[0])
        name = os.fsencode(local.rpartition("/")[2])
        ino = None if parent is None else self._journal.lookup(parent, name)
        if parent is None or ino is None or self._stays(ino, local):
            return
        self._volume.detach_name(parent, name)
        replaced.append(Replaced(parent, name, ino))
        self._remove_empty_folders(local.rpartition("/")[0], replaced)

    def _remove_link(self, local: str, target: str, replaced: list[Replaced]) -> None:
        parent = self._find_folder(local.rpartition("/")[0])
        name = os.fsencode(local.rpartition("/")[2])
        ino = None if parent is None else self._journal.lookup(parent, name)
        if parent is None or ino is None or self._volume.get(ino).target != os.fsencode(target):
            return
        self._volume.detach_name(parent, name)
        replaced.append(Replaced(parent, name, ino))

    def _stays(self, ino: int, local: str) -> bool:
        """Whether a local version is kept: an edit that does not travel, or another kind of node.

        Nothing that travels is dirty during an install, so what is dirty is named in
        `kept_local` and has no other copy.
        """
        inode = self._volume.get(ino)
        if inode.is_file and not inode.dirty:
            return False
        log.info("%s keeps its local version, which does not travel", local)
        return True

    def _remove_empty_folders(self, path: str, replaced: list[Replaced]) -> None:
        while "/" in path:
            ino = self._find_folder(path)
            if ino is None or self._journal.has_children(ino):
                return
            above, _, name = path.rpartition("/")
            parent = self._find_folder(above)
            assert parent is not None, "a folder that exists lies in one that exists"
            self._volume.detach_name(parent, os.fsencode(name))
            replaced.append(Replaced(parent, os.fsencode(name), ino))
            path = above

    def _replace_file(
        self,
        local: str,
        logical: str,
        record: FileRecord,
        attributes: sidecar.Attributes,
        created_ns: int,
        replaced: list[Replaced],
    ) -> None:
        parent = self._make_folders(local.rpartition("/")[0], created_ns, replaced)
        name = os.fsencode(local.rpartition("/")[2])
        known = self._journal.lookup(parent, name)
        if known is not None and self._stays(known, local):
            return
        current = None if known is None else self._volume.get(known)
        entry = attributes.files.get(logical)
        keeps_time = entry is None or entry.sha256 != record.sha256
        if keeps_time and current is not None and current.record is not None:
            # The time of first sight stays while the digest does.
            same = current.record.sha256 == record.sha256
            created_ns = current.mtime_ns if same else created_ns
        inode = self._file_inode(logical, record, attributes, created_ns)
        if current is not None:
            self._volume.detach_name(parent, name)
            replaced.append(Replaced(parent, name, current.ino))
        inode.parent, inode.name = parent, name
        self._journal.insert(inode)
        self._journal.set_dentry(parent, name, inode.ino)

    def _find_folder(self, path: str) -> int | None:
        ino = ROOT_INO
        for part in filter(None, path.split("/")):
            found = self._journal.lookup(ino, os.fsencode(part))
            if found is None:
                return None
            ino = found
        return ino

    def _make_folders(self, path: str, created_ns: int, replaced: list[Replaced]) -> int:
        ino, walked = ROOT_INO, ""
        for part in filter(None, path.split("/")):
            walked = f"{walked}/{part}" if walked else part
            name = os.fsencode(part)
            found = self._journal.lookup(ino, name)
            if found is not None and not self._volume.get(found).is_folder:
                self._volume.detach_name(ino, name)
                replaced.append(Replaced(ino, name, found))
                found = None
            if found is None:
                inode = self._new_inode(
                    self._journal.new_ino(),
                    stat.S_IFDIR | default_mode(walked, folder=True),
                    created_ns,
                )
                inode.parent, inode.name = ino, name
                self._journal.insert(inode)
                self._journal.set_dentry(ino, name, inode.ino)
                above = self._volume.get(ino)
                above.nlink += 1
                self._journal.update(ino, nlink=above.nlink)
                found = inode.ino
            ino = found
        return ino

    # -- links and folders of the sidecar -------------------------------------------------

    def _install_links(
        self, attributes: sidecar.Attributes, replaced: list[Replaced], created_ns: int
    ) -> None:
        for logical, target in attributes.links.items():
            local = to_local(logical)
            if local is None:
                continue
            parent = self._make_folders(local.rpartition("/")[0], created_ns, replaced)
            name = os.fsencode(local.rpartition("/")[2])
            known = self._journal.lookup(parent, name)
            if known is not None:
                current = self._volume.get(known)
                if current.target == os.fsencode(target) or current.is_file:
                    continue
                self._volume.detach_name(parent, name)
                replaced.append(Replaced(parent, name, known))
            inode = self._new_inode(self._journal.new_ino(), stat.S_IFLNK | 0o777, created_ns)
            inode.target = os.fsencode(target)
            inode.size = len(inode.target)
            inode.parent, inode.name = parent, name
            self._journal.insert(inode)
            self._journal.set_dentry(parent, name, inode.ino)

    def _install_folders(self, attributes: sidecar.Attributes, created_ns: int) -> None:
        for logical, entry in attributes.folders.items():
            local = to_local(logical + "/x")
            if local is None:
                continue
            ino = self._make_folders(local[:-2], created_ns, [])
            mode = stat.S_IFDIR | (entry.mode & 0o777)
            inode = self._volume.get(ino)
            inode.mode = mode
            self._journal.update(ino, mode=mode)
            for name, value in entry.xattrs.items():
                self._journal.set_xattr(ino, os.fsencode(name), value)

    # -- config.yaml ----------------------------------------------------------------------

    async def merge_config(self, portable: Portable | None, base: Portable | None) -> bool:
        """Bring the portable settings into this machine's `config.yaml`.

        Returns:
            Whether the file was rewritten or made.
        """
        if portable is None:
            return False
        text = await self.read_config()
        merged = config.merge(text or "", portable, base)
        if merged != text:
            await self._volume.replace_file(CONFIG, merged.encode("utf-8", "surrogateescape"))
        digest = hashlib.sha256(merged.encode("utf-8", "surrogateescape")).hexdigest()
        self._journal.set_meta(META_CONFIG, digest)
        return merged != text

    async def read_config(self) -> str | None:
        """The text of `config.yaml`, or None."""
        try:
            inode = self._volume.resolve(CONFIG)
        except FileNotFoundError:
            return None
        if not inode.is_file:
            return None
        data = await self._volume.read(inode.ino, 0, inode.size)
        return data.decode("utf-8", "surrogateescape")


def checkpoint_row(
    snapshot: Snapshot, digest: str, parent: Reference | None, state: str
) -> Checkpoint:
    """A snapshot as a row of the journal's chain."""
    return Checkpoint(
        seq=0,
        snapshot_id=snapshot.snapshot_id,
        sha256=digest,
        parent_id=None if parent is None else parent.snapshot_id,
        parent_sha256=None if parent is None else parent.sha256,
        created_at=snapshot.created_at,
        device_id=snapshot.device_id,
        state=state,
        files=len(snapshot.files),
        bytes=sum(record.size for record in snapshot.files.values()),
    )
