"""New agents: from nothing, or from an existing Hermes home.

Called by `hpkfs init` and `hpkfs adopt`. The source is only read. What travels becomes the first
checkpoint; everything else becomes this machine's local zone and never reaches the store.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from hpkfs import conversations, places
from hpkfs.agent import Agent, AgentOptions
from hpkfs.core.ids import is_agent_id
from hpkfs.core.limits import MAX_HEAD
from hpkfs.errors import HpkfsError, MissingObjectError, UsageError
from hpkfs.inodes import ROOT_INO, Inode
from hpkfs.transport.local import LocalTransport
from hpkfs.transport.stores import make_transport
from hpkfs.virtual import CONTROL_NAME
from hpkfs.volume import NAME_BYTES_MAX, Caller

if TYPE_CHECKING:
    from hpkfs.transport.base import Transport
    from hpkfs.volume import Volume

log = logging.getLogger(__name__)

BATCH_INODES = 1_000
SQLITE_MAGIC = b"SQLite format 3\0"
SIDECARS = ("-wal", "-shm", "-journal")
BARE_MARKER = "NOT-MOUNTED.txt"

STARTER_FILES = {
    "SOUL.md": "# Who you are\n\nYou are a helpful agent. Edit this file to say who you are.\n",
    "memories/MEMORY.md": "",
    "memories/USER.md": "",
    "workspace/AGENTS.md": (
        "# This workspace\n\nNotes for agents that work here: what the project is, how to build"
        " and test it.\n"
    ),
}


@dataclass(slots=True)
class Imported:
    """What an import did with each path of the source."""

    files: int = 0
    folders: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def init_store(
    uri: str,
    *,
    from_home: str | None = None,
    workspace: str | None = None,
    agent_id: str | None = None,
    state_dir: str | None = None,
) -> dict[str, object]:
    """Make a new agent in a store that has none.

    Returns:
        What was made: `uri`, `agent_id`, `snapshot_id`, `state_dir`, `files` (in the checkpoint),
        `local_files`, `travels` (paths), `kept_local`, `skipped`.

    Raises:
        UsageError: the store has an agent already; nothing was touched.
    """
    return trio.run(_init, uri, from_home, workspace, agent_id, state_dir)


async def _init(
    uri: str,
    from_home: str | None,
    workspace: str | None,
    agent_id: str | None,
    state_dir_option: str | None,
) -> dict[str, object]:
    store, at = places.resolve_uri(uri)
    if at is not None:
        raise UsageError("A new agent has no earlier checkpoint; leave out the `@`.")
    agent_id = agent_id or "default"
    if not is_agent_id(agent_id):
        raise UsageError(
            f"{agent_id!r} cannot be an agent id.",
            next_step="Use a to z, 0 to 9, - and _, at most 64, the first a letter or digit.",
        )
    for source in filter(None, (from_home, workspace)):
        _check_source(source)
    transport = make_transport(store, create=True)
    state_dir = places.state_dir(store, state_dir_option)
    if await _has_head(transport):
        await transport.aclose()
        raise UsageError(
            f"There is an agent in {store} already.",
            kept="Nothing was touched.",
            next_step=f"Mount it with `hpkfs mount {store} DIRECTORY`.",
        )
    lock = places.RunLock(state_dir)
    lock.acquire()
    try:
        options = AgentOptions(
            uri=str(store), state_dir=state_dir, device_id=places.device_id(state_dir)
        )
        agent = Agent(options, transport)
        try:
            return await _fill(agent, agent_id, from_home, workspace)
        finally:
            await agent.close()
    finally:
        lock.release()


async def _has_head(transport: Transport) -> bool:
    try:
        await transport.get("head.json", limit=MAX_HEAD)
    except MissingObjectError:
        return False
    return True


async def _fill(
    agent: Agent, agent_id: str, from_home: str | None, workspace: str | None
) -> dict[str, object]:
    if agent.installer.base() is not None or agent.volume.list_folder(ROOT_INO):
        raise UsageError(
            f"The state directory {agent.options.state_dir} holds another agent's files.",
            kept="Nothing was touched.",
            next_step="Name another one with --state-dir.",
        )
    agent.set_owner(agent_id)
    importer = _Importer(agent.volume, exclude=(agent.options.state_dir, _root(agent)))
    if from_home is not None:
        has_workspace = workspace is not None
        await trio.to_thread.run_sync(
            lambda: importer.tree(from_home, "", leave_out=("workspace",) if has_workspace else ())
        )
    if workspace is not None:
        await trio.to_thread.run_sync(lambda: importer.tree(workspace, "workspace"))
    importer.flush()
    if from_home is None:
        await _write_starters(agent, has_workspace=workspace is not None)
    agent.journal.log(time.time_ns(), "init", agent.options.uri)
    agent.volume.changed_since = agent.volume.changed_last = time.monotonic()
    result = await agent.sync(pull=False)
    survey = agent.sealer.survey()
    return {
        "uri": agent.options.uri,
        "agent_id": agent_id,
        "snapshot_id": result["sealed"],
        "state_dir": agent.options.state_dir,
        "state": result["state"],
        "exit_code": result["exit_code"],
        "detail": result["detail"],
        "files": len(survey.files),
        "local_files": max(importer.done.files - len(survey.files), 0),
        "travels": sorted(entry.path for entry in survey.files.values()),
        "kept_local": agent.status()["kept_local"],
        "skipped": [{"path": p, "reason": r} for p, r in importer.done.skipped],
    }


def _root(agent: Agent) -> str:
    transport = agent.transport
    return transport.root if isinstance(transport, LocalTransport) else ""


async def _write_starters(agent: Agent, *, has_workspace: bool) -> None:
    volume = agent.volume
    root = volume.get(ROOT_INO)
    caller = Caller(root.uid, root.gid)
    for path, text in STARTER_FILES.items():
        folder, _, name = path.rpartition("/")
        if folder == "workspace" and has_workspace:
            continue
        parent = ROOT_INO
        if folder:
            try:
                parent = volume.resolve(folder).ino
            except FileNotFoundError:
                mode = stat.S_IFDIR | (0o755 if folder == "workspace" else 0o700)
                made = volume.make(ROOT_INO, os.fsencode(folder), mode=mode, caller=caller)
                parent = made.ino
        file = volume.make(parent, os.fsencode(name), mode=stat.S_IFREG | 0o644, caller=caller)
        if text:
            await volume.write(file.ino, 0, text.encode())


def _check_source(path: str) -> None:
    if not os.path.isdir(path):
        raise UsageError(
            f"{path} is not a directory.",
            kept="Nothing was touched.",
            next_step="Name the Hermes home, usually ~/.hermes.",
        )
    if os.path.lexists(os.path.join(path, BARE_MARKER)):
        raise UsageError(
            f"{path} is the bare mountpoint of an agent, not a home.",
            kept="Nothing was touched.",
            next_step="Mount its agent there; see `hpkfs list`.",
        )
    try:
        os.listdir(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", kept="Nothing was touched."
        ) from error


class _Importer:
    """Copies a directory tree into a volume that nobody uses yet. Blocking; one thread."""

    def __init__(self, volume: Volume, *, exclude: tuple[str, ...]) -> None:
        self._volume = volume
        self._exclude = {os.path.realpath(path) for path in exclude if path}
        self._inodes: list[Inode] = []
        self._dentries: list[tuple[int, bytes, int]] = []
        self._links: dict[tuple[int, int], Inode] = {}
        self._nlinks: dict[int, int] = {}
        self.done = Imported()

    def tree(self, source: str, target: str, *, leave_out: tuple[str, ...] = ()) -> None:
        """Copy what is in `source` into the folder `target` of the volume."""
        parent = ROOT_INO
        if target:
            found = os.lstat(source)
            parent = self._add(ROOT_INO, os.fsencode(target), found).ino
            self._nlinks[ROOT_INO] = self._nlinks.get(ROOT_INO, 0) + 1
        self._folder(source, parent, target, {*map(os.fsencode, leave_out), CONTROL_NAME})

    def _folder(self, source: str, parent: int, shown: str, leave_out: set[bytes]) -> None:
        try:
            names = sorted(os.listdir(os.fsencode(source)))
        except OSError as error:
            self._skip(shown or ".", f"cannot be listed: {error.strerror}")
            return
        databases = {
            name for name in names if self._is_database(os.path.join(source, os.fsdecode(name)))
        }
        for name in names:
            text = os.fsdecode(name)
            path = os.path.join(source, text)
            place = f"{shown}/{text}" if shown else text
            if name in leave_out or os.path.realpath(path) in self._exclude:
                if name != CONTROL_NAME:
                    self._skip(place, "is taken from elsewhere or belongs to hpkfs")
                continue
            if any(
                text.endswith(end) and os.fsencode(text.removesuffix(end)) in databases
                for end in SIDECARS
            ):
                continue  # its content comes with the database
            try:
                self._entry(path, parent, name, place, is_database=name in databases)
            except OSError as error:
                self._skip(place, f"cannot be read: {error.strerror}")
            except HpkfsError as error:
                self._skip(place, error.happened)

    def _is_database(self, path: str) -> bool:
        """Whether a regular file is an SQLite database with sidecars beside it."""
        if not any(os.path.lexists(path + end) for end in SIDECARS):
            return False
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return False
            with open(path, "rb") as source:
                head = source.read(len(SQLITE_MAGIC))
        except OSError:
            return False
        return head == SQLITE_MAGIC

    def _entry(self, path: str, parent: int, name: bytes, place: str, *, is_database: bool) -> None:
        found = os.lstat(path)
        if len(name) > NAME_BYTES_MAX:
            self._skip(place, "has too long a name")
        elif stat.S_ISDIR(found.st_mode):
            inode = self._add(parent, name, found)
            self._nlinks[parent] = self._nlinks.get(parent, 0) + 1
            self.done.folders += 1
            self._folder(path, inode.ino, place, {CONTROL_NAME} if parent == 0 else set())
        elif stat.S_ISLNK(found.st_mode):
            target = os.readlink(os.fsencode(path))
            self._add(parent, name, found, target=target)
        elif stat.S_ISREG(found.st_mode):
            self._file(path, parent, name, found, is_database=is_database)
        elif stat.S_ISFIFO(found.st_mode):
            self._add(parent, name, found)
        else:
            self._skip(place, "is a socket or device; the program that needs it makes it anew")

    def _file(
        self, path: str, parent: int, name: bytes, found: os.stat_result, *, is_database: bool
    ) -> None:
        key = (found.st_dev, found.st_ino)
        linked = self._links.get(key) if found.st_nlink > 1 else None
        if linked is not None:
            self._dentries.append((parent, name, linked.ino))
            linked.nlink += 1
            return
        source = path
        with tempfile.TemporaryDirectory(prefix="hpkfs-import-") as scratch:
            if is_database:
                source = conversations.backup_database(path, scratch)
            inode = self._make(found, parent, name)
            backing = self._volume.content.path(inode.ino)
            with open(source, "rb") as read, open(backing, "wb", opener=_private) as out:
                shutil.copyfileobj(read, out, 1 << 20)
            os.utime(backing, ns=(found.st_mtime_ns, found.st_mtime_ns))
        inode.size = os.stat(backing).st_size
        self._keep(inode, parent, name)
        if found.st_nlink > 1:
            self._links[key] = inode
        self.done.files += 1
        self.done.bytes += inode.size

    def _add(
        self, parent: int, name: bytes, found: os.stat_result, *, target: bytes | None = None
    ) -> Inode:
        inode = self._make(found, parent, name)
        inode.target = target
        inode.size = len(target) if target is not None else 0
        self._keep(inode, parent, name)
        return inode

    def _make(self, found: os.stat_result, parent: int, name: bytes) -> Inode:
        is_root = os.getuid() == 0
        return Inode(
            (
                self._volume.journal.new_ino(),
                found.st_mode,
                found.st_uid if is_root else os.getuid(),
                found.st_gid if is_root else os.getgid(),
                0,
                2 if stat.S_ISDIR(found.st_mode) else 1,
                0,
                found.st_atime_ns,
                found.st_mtime_ns,
                found.st_ctime_ns,
                None,
                None,
                None,
                1,
                parent,
                name,
                None,
                None,
            )
        )

    def _keep(self, inode: Inode, parent: int, name: bytes) -> None:
        self._inodes.append(inode)
        self._dentries.append((parent, name, inode.ino))

    def flush(self) -> None:
        """Write the names of everything copied into the journal, in one transaction."""
        journal = self._volume.journal
        by_ino = {inode.ino: inode for inode in self._inodes}
        for ino, count in self._nlinks.items():
            if ino in by_ino:
                by_ino[ino].nlink += count
        with journal.transaction():
            journal.bulk_insert(self._inodes, self._dentries)
            if ROOT_INO in self._nlinks:
                root = self._volume.get(ROOT_INO)
                root.nlink += self._nlinks[ROOT_INO]
                journal.update(ROOT_INO, nlink=root.nlink)

    def _skip(self, path: str, reason: str) -> None:
        self.done.skipped.append((os.fsencode(path).decode("utf-8", "backslashreplace"), reason))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
