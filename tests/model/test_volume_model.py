"""A state machine drives an agent's tree beside a plain model in memory; both must agree.

Between the operations of a file system the agent is sealed, published, evicted, closed, killed
(its state directory is copied as it is at that moment) or the machine is rebooted; and it moves to
a machine that has never seen it, where everything that travels must be the same.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.faults import opened
from support.stores import make_store

from hpkfs import recovery
from hpkfs.agent import Agent, AgentOptions
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.inodes import ROOT_INO
from hpkfs.transport.local import LocalTransport
from hpkfs.volume import Caller, Change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_T = TypeVar("_T")

ME = Caller(os.getuid(), os.getgid())
NAMES = ("a", "b", "c.md")
FOLDERS = ("workspace", "skills", "logs")
TRAVELLING = ("workspace", "skills")
NODES_MAX = 40
MANY = 1 << 40
SIZES = st.sampled_from(
    (0, 1, 100, 5_000, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 7, 2 * PIECE_SIZE + 9)
)
SEEDS = st.integers(0, 1 << 16)
TIMES = st.sampled_from((0, 1, 1_700_000_000_123_456_789, 2_000_000_000_000_000_001))


@dataclass(eq=False)
class Node:
    """What the model knows of a file, folder or link; one object for all hard links."""

    kind: str
    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)
    target: str = ""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    # None: not looked at since it was written.
    mtime_ns: int | None = None
    # Another program stored it, without a time: each machine has the one when it first saw it.
    timeless: bool = False


class VolumeMachine(RuleBasedStateMachine):
    """The rules; each does the same to the agent and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Path(tempfile.mkdtemp(prefix="hpkfs-model-"))
        self.numbers = itertools.count()
        self.store = self.scratch / "store"
        self.state = self.scratch / "state"
        self.boot = self.scratch / "boot-id"
        self.boot.write_text("first")
        self.root = Node("folder", 0o700)
        self.held: list[tuple[int, Node]] = []
        self.agent: Agent | None = None
        self._boot_file = recovery.BOOT_ID_FILE
        recovery.BOOT_ID_FILE = str(self.boot)

    # -- the agent ------------------------------------------------------------------------

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed: int) -> None:
        expected = make_store(str(self.store), seed=seed, files=6, checkpoints=2, big_files=1)
        self.open()
        for path, file in expected.newest.visible.items():
            *folders, name = path.split("/")
            node = self.root
            for part in folders:
                node = node.names.setdefault(part, Node("folder", 0o755))
            mode = 0o755 if file.executable else 0o644
            node.names[name] = Node("file", mode, bytearray(file.data), timeless=True)
        for name in FOLDERS:
            if name not in self.root.names:
                self.make_at(self.root, ROOT_INO, name, stat.S_IFDIR | 0o755)
        if self.root.names["skills"].names:
            self.root.names["skills"].mode = 0o700
        # It may not be as long as the others are written here.
        self.opened.volume.unlink(ROOT_INO, b"SOUL.md")
        del self.root.names["SOUL.md"]
        self.check_contents()

    def run(self, call: Callable[..., Awaitable[_T]], *args: Any, **more: Any) -> _T:
        return trio.run(partial(call, *args, **more))

    def open(self) -> None:
        options = AgentOptions(
            uri=f"file://{self.store}",
            state_dir=str(self.state),
            device_id="f" * 32,
            mountpoint="/mnt/agent",
        )
        self.agent = Agent(options, LocalTransport(str(self.store)))
        self.run(self.agent.prepare)

    @property
    def opened(self) -> Agent:
        assert self.agent is not None, "made by begin"
        return self.agent

    # -- choosing -------------------------------------------------------------------------

    def places(self, *kinds: str) -> list[tuple[Node, str, Node]]:
        """Folder, name and node of everything of these kinds, in a fixed order."""
        found = []

        def walk(folder: Node) -> None:
            for name in sorted(folder.names):
                node = folder.names[name]
                if node.kind in kinds:
                    found.append((folder, name, node))
                if node.kind == "folder":
                    walk(node)

        walk(self.root)
        return found

    def folders(self) -> list[Node]:
        return [node for _, _, node in self.places("folder")]

    def path(self, wanted: Node) -> str:
        """The path of a folder."""
        if wanted is self.root:
            return ""
        for folder, name, node in self.places("folder"):
            if node is wanted:
                return f"{self.path(folder)}/{name}"
        raise AssertionError("a folder outside the tree")

    def ino(self, folder: Node, name: str | None = None) -> int:
        path = self.path(folder) if name is None else f"{self.path(folder)}/{name}"
        return self.opened.volume.resolve(path).ino

    def links(self, node: Node) -> int:
        return sum(other is node for _, _, other in self.places("file", "link", "folder"))

    def pick(self, data: st.DataObject, things: list[_T]) -> _T:
        return things[data.draw(st.integers(0, len(things) - 1), label="which")]

    def has(self, *kinds: str) -> bool:
        return bool(self.places(*kinds))

    # -- names ----------------------------------------------------------------------------

    def make_at(
        self, folder: Node, parent: int, name: str, mode: int, target: str | None = None
    ) -> None:
        encoded = None if target is None else target.encode()
        volume = self.opened.volume
        call = partial(volume.make, parent, name.encode(), mode=mode, caller=ME, target=encoded)
        if name in folder.names:
            with pytest.raises(FileExistsError):
                call()
            return
        inode = call()
        volume.forget(inode.ino, MANY)
        kind = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
        node = Node(kind[stat.S_IFMT(mode)], stat.S_IMODE(mode), target=target or "")
        folder.names[name] = node

    @precondition(lambda self: len(self.places("file", "link", "folder")) < NODES_MAX)
    @rule(
        data=st.data(),
        name=st.sampled_from(NAMES),
        mode=st.sampled_from((stat.S_IFREG | 0o644, stat.S_IFREG | 0o700, stat.S_IFDIR | 0o755)),
    )
    def make(self, data: st.DataObject, name: str, mode: int) -> None:
        folder = self.pick(data, self.folders())
        self.make_at(folder, self.ino(folder), name, mode)

    @rule(data=st.data(), name=st.sampled_from(NAMES), leads_to=st.sampled_from(NAMES))
    def symlink(self, data: st.DataObject, name: str, leads_to: str) -> None:
        folder = self.pick(data, self.folders())
        self.make_at(folder, self.ino(folder), name, stat.S_IFLNK | 0o777, leads_to)

    @precondition(lambda self: self.has("file"))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def link(self, data: st.DataObject, name: str) -> None:
        place, old, node = self.pick(data, self.places("file"))
        folder = self.pick(data, self.folders())
        ino, parent = self.ino(place, old), self.ino(folder)
        if name in folder.names:
            with pytest.raises(OSError, match="exists"):
                self.opened.volume.link(ino, parent, name.encode())
            return
        self.opened.volume.link(ino, parent, name.encode())
        self.opened.volume.forget(ino, MANY)
        folder.names[name] = node

    @precondition(lambda self: self.has("file", "link"))
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        folder, name, _ = self.pick(data, self.places("file", "link"))
        self.opened.volume.unlink(self.ino(folder), name.encode())
        del folder.names[name]

    @rule(data=st.data())
    def rmdir(self, data: st.DataObject) -> None:
        inner = [place for place in self.places("folder") if place[0] is not self.root]
        if not inner:
            return
        folder, name, node = self.pick(data, inner)
        if node.names:
            with pytest.raises(OSError, match="not empty"):
                self.opened.volume.rmdir(self.ino(folder), name.encode())
            return
        self.opened.volume.rmdir(self.ino(folder), name.encode())
        del folder.names[name]

    def movable(self) -> list[tuple[Node, str, Node]]:
        found = self.places("file", "link", "folder")
        return [place for place in found if not (place[0] is self.root and place[1] in FOLDERS)]

    @precondition(lambda self: bool(self.movable()))
    @rule(data=st.data(), new_name=st.sampled_from(NAMES))
    def rename(self, data: st.DataObject, new_name: str) -> None:
        folder, name, node = self.pick(data, self.movable())
        target = self.pick(data, self.folders())
        call = partial(
            self.opened.volume.rename,
            self.ino(folder),
            name.encode(),
            self.ino(target),
            new_name.encode(),
        )
        victim = target.names.get(new_name)
        expected = self.why_not(node, victim, target)
        if expected:
            with pytest.raises(OSError, match=os.strerror(expected)):
                call()
            return
        call()
        if victim is node:
            return
        del folder.names[name]
        target.names[new_name] = node

    def why_not(self, node: Node, victim: Node | None, target: Node) -> int:
        """The errno that rename(2) answers; 0 when it works."""
        if victim is node:
            return 0
        if node.kind == "folder" and self.is_in(target, node):
            return errno.EINVAL
        if victim is None:
            return 0
        if node.kind == "folder" and victim.kind != "folder":
            return errno.ENOTDIR
        if node.kind != "folder" and victim.kind == "folder":
            return errno.EISDIR
        return errno.ENOTEMPTY if victim.names else 0

    def is_in(self, inner: Node, outer: Node) -> bool:
        return inner is outer or any(
            node.kind == "folder" and self.is_in(inner, node) for node in outer.names.values()
        )

    @precondition(lambda self: len(self.movable()) > 1)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        folder, name, node = self.pick(data, self.movable())
        target, other_name, other = self.pick(data, self.movable())
        call = partial(
            self.opened.volume.rename,
            self.ino(folder),
            name.encode(),
            self.ino(target),
            other_name.encode(),
            exchange=True,
        )
        loops = (node.kind == "folder" and self.is_in(target, node)) or (
            other.kind == "folder" and self.is_in(folder, other)
        )
        if loops and node is not other:
            with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
                call()
            return
        call()
        folder.names[name], target.names[other_name] = other, node

    # -- content and attributes -----------------------------------------------------------

    def files(self) -> list[tuple[int | None, Node, Node | None, str]]:
        named = [(None, node, folder, name) for folder, name, node in self.places("file")]
        return [*named, *((ino, node, None, "") for ino, node in self.held)]

    @precondition(lambda self: bool(self.files()))
    @rule(data=st.data(), where=SIZES, size=SIZES, seed=SEEDS)
    def write(self, data: st.DataObject, where: int, size: int, seed: int) -> None:
        ino, node, folder, name = self.pick(data, self.files())
        if ino is None:
            assert folder is not None
            ino = self.ino(folder, name)
        offset = data.draw(st.sampled_from((0, len(node.data), where)), label="offset")
        new = random.Random(seed).randbytes(size)
        assert self.run(self.opened.volume.write, ino, offset, new) == size
        if size:
            node.data.extend(bytes(max(offset - len(node.data), 0)))
            node.data[offset : offset + size] = new
        node.mtime_ns, node.timeless = None, False
        assert self.read(ino) == node.data

    @precondition(lambda self: bool(self.files()))
    @rule(data=st.data(), size=SIZES)
    def truncate(self, data: st.DataObject, size: int) -> None:
        ino, node, folder, name = self.pick(data, self.files())
        if ino is None:
            assert folder is not None
            ino = self.ino(folder, name)
        self.run(self.opened.volume.setattr, ino, Change(size=size))
        del node.data[size:]
        node.data.extend(bytes(size - len(node.data)))
        node.mtime_ns, node.timeless = None, False
        assert self.read(ino) == node.data

    def read(self, ino: int) -> bytes:
        return self.run(self.opened.volume.read, ino, 0, self.opened.volume.get(ino).size)

    @precondition(lambda self: self.has("file"))
    @rule(data=st.data(), mode=st.sampled_from((0o600, 0o644, 0o755, 0o444)), time_ns=TIMES)
    def set_attributes(self, data: st.DataObject, mode: int, time_ns: int) -> None:
        folder, name, node = self.pick(data, self.places("file"))
        change = data.draw(st.sampled_from((Change(mode=mode), Change(mtime_ns=time_ns))))
        self.run(self.opened.volume.setattr, self.ino(folder, name), change)
        if change.mode is not None and change.mode != node.mode:
            node.mode, node.timeless = change.mode, False
        if change.mtime_ns is not None:
            node.mtime_ns, node.timeless = change.mtime_ns, False

    @rule(data=st.data(), mode=st.sampled_from((0o700, 0o755, 0o711)))
    def set_folder_mode(self, data: st.DataObject, mode: int) -> None:
        node = self.pick(data, self.folders())
        self.run(self.opened.volume.setattr, self.ino(node), Change(mode=mode))
        node.mode = mode

    @rule(
        data=st.data(),
        name=st.sampled_from((b"user.a", b"user.b")),
        value=st.sampled_from((b"", b"\xff\0", b"long" * 50, None)),
    )
    def set_xattr(self, data: st.DataObject, name: bytes, value: bytes | None) -> None:
        folder, called, node = self.pick(data, self.places("file", "folder"))
        ino = self.ino(folder, called)
        if value is not None:
            self.opened.volume.set_xattr(ino, name, value)
            node.xattrs[name] = value
            node.timeless = False
        elif name in node.xattrs:
            self.opened.volume.remove_xattr(ino, name)
            del node.xattrs[name]
        else:
            with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
                self.opened.volume.remove_xattr(ino, name)

    # -- open files -----------------------------------------------------------------------

    @precondition(lambda self: self.has("file") and len(self.held) < 3)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        folder, name, node = self.pick(data, self.places("file"))
        ino = self.ino(folder, name)
        self.run(self.opened.volume.open, ino, os.O_RDWR)
        self.held.append((ino, node))

    @precondition(lambda self: bool(self.held))
    @rule()
    def let_go(self) -> None:
        ino, node = self.held.pop()
        assert self.read(ino) == node.data
        self.opened.volume.release(ino)

    # -- the agent's own life -------------------------------------------------------------

    @rule()
    def seal(self) -> None:
        self.run(self.opened.sync, pull=False, publish=False)

    @rule()
    def publish(self) -> None:
        self.run(self.opened.sync)
        assert self.opened.outcome()["state"] == "clean", self.opened.outcome()

    @rule()
    def evict(self) -> None:
        self.run(self.opened.evict, [])

    @rule()
    def upkeep(self) -> None:
        self.opened.content.save_states()
        self.opened.volume.bury()
        recovery.remove_dropped(self.opened.journal, self.opened.content)

    @rule()
    def close_and_open(self) -> None:
        for ino, _ in self.held:
            self.opened.volume.release(ino)
        self.held = []
        self.run(self.opened.close)
        self.open()
        self.check_contents()

    @rule(reboot=st.booleans())
    def crash_and_open(self, reboot: bool) -> None:
        """The daemon dies: what it leaves is what its files hold at this moment."""
        self.held = []
        left = self.scratch / f"state-{next(self.numbers)}"
        shutil.copytree(self.state, left, copy_function=shutil.copy2)
        self.abandon()
        shutil.rmtree(self.state)
        self.state = left
        if reboot:
            self.boot.write_text(f"boot {next(self.numbers)}")
        self.open()
        assert self.opened.unclean
        self.check_contents()

    def abandon(self) -> None:
        """Let go of what a dead process would not hold any more."""
        if self.agent is not None:
            self.agent.content.close()
            self.agent.journal.close()
            self.agent = None

    @rule()
    def move_to_another_machine(self) -> None:
        self.publish()
        self.check_contents()
        for ino, _ in self.held:
            self.opened.volume.release(ino)
        self.held = []
        self.run(self.opened.close)
        shutil.rmtree(self.state)
        self.state = self.scratch / f"machine-{next(self.numbers)}"
        self.root = self.as_elsewhere(self.root, "")
        self.open()
        for name in FOLDERS:
            if name not in self.root.names:
                self.make_at(self.root, ROOT_INO, name, stat.S_IFDIR | 0o755)
        self.check_names()
        assert all(self.opened.journal.lookup(ROOT_INO, n.encode()) for n in FOLDERS)
        self.check_contents()

    def as_elsewhere(self, folder: Node, path: str) -> Node:
        """What of a folder another machine sees: hard links are files of their own there."""
        copy = Node("folder", folder.mode, xattrs=dict(folder.xattrs))
        for name, node in folder.names.items():
            below = f"{path}/{name}".lstrip("/")
            if not below.startswith(TRAVELLING):
                continue
            if node.kind == "folder":
                copy.names[name] = self.as_elsewhere(node, below)
            else:
                copy.names[name] = Node(
                    node.kind,
                    node.mode,
                    node.data[:],
                    target=node.target,
                    xattrs=dict(node.xattrs),
                    mtime_ns=None if node.timeless else node.mtime_ns,
                    timeless=node.timeless,
                )
        return copy

    # -- comparing ------------------------------------------------------------------------

    @invariant()
    def check_names(self) -> None:
        """Names, kinds, sizes, modes, link counts, times."""
        if self.agent is not None:
            self.compare(self.root, ROOT_INO, "")

    def compare(self, folder: Node, ino: int, path: str) -> None:
        volume = self.opened.volume
        found = {os.fsdecode(name): number for name, number in volume.list_folder(ino)}
        if path == "":
            found.pop("config.yaml", None)
        assert sorted(found) == sorted(folder.names), path
        below = sum(node.kind == "folder" for node in folder.names.values())
        assert volume.get(ino).nlink == 2 + below, path
        for name, node in folder.names.items():
            inode = volume.find(ino, name.encode())
            where = f"{path}/{name}"
            assert inode.ino == found[name], where
            assert stat.S_IMODE(inode.mode) == node.mode, where
            assert self.opened.journal.list_xattrs(inode.ino) == node.xattrs, where
            if node.kind == "folder":
                assert inode.is_folder, where
                self.compare(node, inode.ino, where)
                continue
            assert inode.nlink == self.links(node), where
            if node.kind == "link":
                assert inode.target == node.target.encode(), where
                continue
            assert inode.is_file, where
            assert inode.size == len(node.data), where
            if node.mtime_ns is None:
                node.mtime_ns = inode.mtime_ns
            assert inode.mtime_ns == node.mtime_ns, where

    def check_contents(self) -> None:
        for folder, name, node in self.places("file"):
            assert self.read(self.ino(folder, name)) == node.data, name
        for ino, node in self.held:
            assert self.read(ino) == node.data
        assert self.opened.journal.check() == []

    def teardown(self) -> None:
        try:
            if self.agent is not None:
                self.check_contents()
                self.move_to_another_machine()
                self.run(self.opened.close)
                self.agent = None
        finally:
            with contextlib.suppress(Exception):  # the first failure is the one to be told
                self.abandon()
            recovery.BOOT_ID_FILE = self._boot_file
            shutil.rmtree(self.scratch)


@contextlib.contextmanager
def _quick(*, examples: int, steps: int) -> Iterator[settings]:
    yield settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )


def test_a_tree_is_what_was_made_of_it_whatever_happens_in_between() -> None:
    with _quick(examples=30, steps=50) as chosen:
        run_state_machine_as_test(VolumeMachine, settings=chosen)


@pytest.mark.long
def test_a_tree_is_what_was_made_of_it_for_a_long_time() -> None:
    with _quick(examples=2_000, steps=120) as chosen:
        run_state_machine_as_test(VolumeMachine, settings=chosen)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(str(tmp_path / "store"), seed=1, files=3, checkpoints=1, big_files=0)
    return tmp_path / "store"


async def test_regression_a_file_that_moves_keeps_its_time_on_the_next_machine(
    store: Path, tmp_path: Path
) -> None:
    async with opened(store, tmp_path / "one") as desk:
        inode = await desk.write("workspace/a", b"text")
        await desk.volume.setattr(inode.ino, Change(mtime_ns=1_234_567_890_123_456_789))
        await desk.agent.sync()
        desk.rename("workspace/a", "workspace/b")
        desk.volume.link(inode.ino, desk.folder("workspace"), b"c")
        await desk.agent.sync()
    async with opened(store, tmp_path / "two") as desk:
        for path in ("workspace/b", "workspace/c"):
            assert desk.volume.resolve(path).mtime_ns == 1_234_567_890_123_456_789


async def test_regression_the_time_of_a_file_that_was_only_made_survives_a_restart(
    store: Path, tmp_path: Path
) -> None:
    async with opened(store, tmp_path / "state") as desk:
        told = (await desk.write("workspace/empty", b"")).mtime_ns
    async with opened(store, tmp_path / "state") as desk:
        assert desk.volume.resolve("workspace/empty").mtime_ns == told
