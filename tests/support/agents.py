"""An agent without a kernel mount, for tests: what a person would do, through the volume."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from hpkfs.agent import Agent, AgentOptions
from hpkfs.inodes import ROOT_INO
from hpkfs.transport.local import LocalTransport
from hpkfs.volume import Caller, Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hpkfs.inodes import Inode

ME = Caller(os.getuid(), os.getgid())


class Desk:
    """One machine's opened agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.volume = agent.volume

    async def read(self, path: str) -> bytes:
        """The bytes of a file."""
        inode = self.volume.resolve(path)
        return await self.volume.read(inode.ino, 0, inode.size)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> Inode:
        """Make or replace a file, with its folders."""
        folder, _, name = path.rpartition("/")
        parent = self.folder(folder)
        try:
            inode = self.volume.resolve(path)
            await self.volume.setattr(inode.ino, Change(size=0))
        except FileNotFoundError:
            inode = self.volume.make(parent, os.fsencode(name), mode=stat.S_IFREG | mode, caller=ME)
        if data:
            await self.volume.write(inode.ino, 0, data)
        return self.volume.get(inode.ino)

    def folder(self, path: str) -> int:
        """The inode number of a folder, made if it is missing."""
        ino = ROOT_INO
        for part in filter(None, path.split("/")):
            found = self.volume.journal.lookup(ino, os.fsencode(part))
            if found is None:
                mode = stat.S_IFDIR | 0o755
                found = self.volume.make(ino, os.fsencode(part), mode=mode, caller=ME).ino
            ino = found
        return ino

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        folder, _, name = path.rpartition("/")
        self.volume.make(
            self.folder(folder),
            os.fsencode(name),
            mode=stat.S_IFLNK | 0o777,
            caller=ME,
            target=os.fsencode(target),
        )

    def remove(self, path: str) -> None:
        """Remove a file."""
        folder, _, name = path.rpartition("/")
        self.volume.unlink(self.folder(folder), os.fsencode(name))

    def rename(self, old: str, new: str) -> None:
        """Move a name."""
        old_folder, _, old_name = old.rpartition("/")
        new_folder, _, new_name = new.rpartition("/")
        self.volume.rename(
            self.folder(old_folder),
            os.fsencode(old_name),
            self.folder(new_folder),
            os.fsencode(new_name),
        )

    def exists(self, path: str) -> bool:
        """Whether a path is in the tree."""
        try:
            self.volume.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def kept(self) -> dict[str, str]:
        """What stays local, and why."""
        kept = self.agent.status()["kept_local"]
        assert isinstance(kept, list)
        return {one["path"]: one["reason"] for one in kept}

    def paths(self) -> set[str]:
        """Logical paths of the base."""
        base = self.agent.installer.base()
        return set(base[0].files) if base else set()


@contextlib.asynccontextmanager
async def desk(
    store: Path | str, state: Path, *, offline: bool = False, cache_bytes: int = 4 << 30
) -> AsyncIterator[Desk]:
    """Open an agent, as a mount does."""
    options = AgentOptions(
        uri=f"file://{store}",
        state_dir=str(state),
        device_id=f"{abs(hash(state.name)):032x}"[-32:],
        mountpoint="/mnt/agent",
        offline=offline,
        cache_bytes=cache_bytes,
    )
    agent = Agent(options, LocalTransport(str(store)))
    try:
        await agent.prepare()
        yield Desk(agent)
    finally:
        await agent.close()
