"""pyfuse3 on one side, `Volume` and the virtual tree on the other: translates, decides nothing.

Every handler ends in a reply or an errno; an unknown exception is logged with its traceback and
answered EIO, because any other exception would end the mount (pyfuse3 documentation, `main`).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from typing import TYPE_CHECKING, Any, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError

from hpkfs.errors import HpkfsError
from hpkfs.volume import Caller, Change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pyfuse3 import (
        FileHandleT,
        FileNameT,
        FlagT,
        InodeT,
        ModeT,
        ReaddirToken,
        RequestContext,
        SetattrFields,
        XAttrNameT,
    )

    from hpkfs.virtual import Node, VirtualTree
    from hpkfs.volume import Volume

log = logging.getLogger(__name__)

# The daemon is the only one who changes the tree, and it tells the kernel when it does.
CACHE_S = 86_400.0
BLOCK_BYTES = 4_096
STAT_BLOCK_BYTES = 512
VIRTUAL_INO_MIN = 1 << 48
# Not `system`: an access control list that is stored and not enforced would be a lie (acl(5)).
XATTR_NAMESPACES = (b"user.", b"trusted.", b"security.")

Handler = TypeVar("Handler", bound="Callable[..., Awaitable[Any]]")


def answered(handler: Handler) -> Handler:
    """Turn what a handler raises into the errno of the reply."""

    @functools.wraps(handler)
    async def run(self: Filesystem, *args: Any) -> Any:
        self.begun += 1
        try:
            return await handler(self, *args)
        except FUSEError:
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except HpkfsError as error:
            self.failed(handler.__name__, error)
            raise FUSEError(error.errno) from None
        except Exception:
            log.exception("%s%r failed", handler.__name__, args)
            raise FUSEError(errno.EIO) from None
        finally:
            self.begun -= 1

    return run  # type: ignore[return-value]  # the same signature


class Filesystem(pyfuse3.Operations):
    """The handlers. Numbers from `VIRTUAL_INO_MIN` on belong to the virtual tree."""

    def __init__(
        self,
        volume: Volume | None,
        virtual: VirtualTree,
        *,
        xattr: bool = False,
        owner: Caller | None = None,
        umask: int = 0,
        on_failure: Callable[[HpkfsError], None] | None = None,
    ) -> None:
        super().__init__()
        self._volume = volume
        self._virtual = virtual
        self._xattr = xattr
        self._owner = owner
        self._umask = umask
        self._on_failure = on_failure
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._next_listing = 1
        # Handlers that have begun and not ended.
        self.begun = 0

    def is_busy(self) -> bool:
        """Whether some handler has begun and waits for something."""
        return self.begun > 0

    def failed(self, handler: str, error: HpkfsError) -> None:
        """Log a failure once and remember it for status."""
        log.info("%s: %s", handler, error)
        if self._on_failure is not None:
            self._on_failure(error)

    # -- helpers --------------------------------------------------------------------------

    def _writable(self, ino: int) -> Volume:
        if self._volume is None:
            raise FUSEError(errno.EROFS)
        if ino >= VIRTUAL_INO_MIN:
            raise FUSEError(errno.EPERM)
        return self._volume

    def _is_virtual(self, ino: int) -> bool:
        return ino >= VIRTUAL_INO_MIN or self._volume is None

    def _attributes(self, inode: Any) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode.ino
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size
        entry.st_blksize = BLOCK_BYTES
        entry.st_blocks = (inode.size + STAT_BLOCK_BYTES - 1) // STAT_BLOCK_BYTES
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        entry.entry_timeout = CACHE_S
        entry.attr_timeout = CACHE_S
        if self._owner is not None:
            entry.st_uid, entry.st_gid = self._owner.uid, self._owner.gid
        if self._umask:
            entry.st_mode = pyfuse3.ModeT(entry.st_mode & ~self._umask)
        return entry

    def _node(self, node: Node) -> EntryAttributes:
        entry = self._attributes(node)
        entry.entry_timeout = entry.attr_timeout = node.cache_s
        return entry

    # -- names ----------------------------------------------------------------------------

    @answered
    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Find a name; the kernel remembers that there is none, too."""
        if self._is_virtual(parent_inode) or self._virtual.owns(parent_inode, name):
            return self._node(await self._virtual.lookup(parent_inode, name))
        assert self._volume is not None, "not virtual"
        try:
            return self._attributes(self._volume.lookup(parent_inode, name))
        except FileNotFoundError:
            missing = EntryAttributes()
            missing.st_ino = pyfuse3.InodeT(0)
            missing.entry_timeout = CACHE_S
            return missing

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """The kernel dropped references; no reply."""
        if self._volume is None:
            return
        for ino, count in inode_list:
            if ino < VIRTUAL_INO_MIN:
                self._volume.forget(ino, count)

    @answered
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Attributes of an inode."""
        if self._is_virtual(inode):
            return self._node(self._virtual.get(inode))
        assert self._volume is not None, "not virtual"
        return self._attributes(self._volume.get(inode))

    @answered
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Change attributes."""
        volume = self._writable(inode)
        change = Change(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return self._attributes(await volume.setattr(inode, change))

    @answered
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """The target of a link."""
        if self._is_virtual(inode):
            target = self._virtual.get(inode).target
        else:
            assert self._volume is not None, "not virtual"
            target = self._volume.get(inode).target
        if target is None:
            raise FUSEError(errno.EINVAL)
        return pyfuse3.FileNameT(target)

    @answered
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a fifo, socket, device node or file."""
        volume = self._writable(parent_inode)
        caller = Caller(ctx.uid, ctx.gid)
        return self._attributes(
            volume.make(parent_inode, name, mode=mode, caller=caller, rdev=rdev)
        )

    @answered
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a folder."""
        volume = self._writable(parent_inode)
        self._refuse_virtual(parent_inode, name)
        kind = stat.S_IFDIR | (mode & 0o7777)
        return self._attributes(
            volume.make(parent_inode, name, mode=kind, caller=Caller(ctx.uid, ctx.gid))
        )

    @answered
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symbolic link."""
        volume = self._writable(parent_inode)
        self._refuse_virtual(parent_inode, name)
        made = volume.make(
            parent_inode,
            name,
            mode=stat.S_IFLNK | 0o777,
            caller=Caller(ctx.uid, ctx.gid),
            target=bytes(target),
        )
        return self._attributes(made)

    @answered
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a hard link."""
        self._writable(new_parent_inode)
        volume = self._writable(inode)
        self._refuse_virtual(new_parent_inode, new_name)
        return self._attributes(volume.link(inode, new_parent_inode, new_name))

    @answered
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a name."""
        self._writable(parent_inode).unlink(parent_inode, name)

    @answered
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove an empty folder."""
        volume = self._writable(parent_inode)
        self._keep_virtual(parent_inode, name)
        volume.rmdir(parent_inode, name)

    @answered
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Move a name."""
        self._writable(parent_inode_new)
        volume = self._writable(parent_inode_old)
        self._keep_virtual(parent_inode_old, name_old)
        self._refuse_virtual(parent_inode_new, name_new)
        if flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE):
            raise FUSEError(errno.EINVAL)
        volume.rename(
            parent_inode_old,
            name_old,
            parent_inode_new,
            name_new,
            no_replace=bool(flags & pyfuse3.RENAME_NOREPLACE),
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
        )

    def _refuse_virtual(self, parent: int, name: bytes) -> None:
        if self._virtual.owns(parent, name):
            raise FUSEError(errno.EEXIST)

    def _keep_virtual(self, parent: int, name: bytes) -> None:
        if self._virtual.owns(parent, name):
            raise FUSEError(errno.EPERM)

    # -- files ----------------------------------------------------------------------------

    @answered
    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        """Make a file and open it."""
        volume = self._writable(parent_inode)
        self._refuse_virtual(parent_inode, name)
        inode = await volume.create(parent_inode, name, mode=mode, caller=Caller(ctx.uid, ctx.gid))
        info = FileInfo(fh=pyfuse3.FileHandleT(inode.ino), keep_cache=True)
        return info, self._attributes(inode)

    @answered
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open a file; the kernel keeps what it has cached of it."""
        fh = pyfuse3.FileHandleT(inode)
        if self._is_virtual(inode):
            if flags & os.O_ACCMODE != os.O_RDONLY:
                raise FUSEError(errno.EROFS)
            fixed = self._virtual.open(inode)
            return FileInfo(fh=fh, keep_cache=fixed, direct_io=not fixed)
        assert self._volume is not None, "not virtual"
        await self._volume.open(inode, flags)
        return FileInfo(fh=fh, keep_cache=True)

    @answered
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Read from a file."""
        if self._is_virtual(fh):
            return await self._virtual.read(fh, off, size)
        assert self._volume is not None, "not virtual"
        return await self._volume.read(fh, off, size)

    @answered
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write to a file."""
        return await self._writable(fh).write(fh, off, buf)

    async def flush(self, fh: FileHandleT) -> None:
        """Writes are through already; ENOSYS ends these calls for the whole mount (fuse(4))."""
        raise FUSEError(errno.ENOSYS)

    @answered
    async def release(self, fh: FileHandleT) -> None:
        """The last descriptor of an open is closed."""
        if not self._is_virtual(fh):
            assert self._volume is not None, "not virtual"
            self._volume.release(fh)

    @answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Make a file durable."""
        if not self._is_virtual(fh):
            assert self._volume is not None, "not virtual"
            await self._volume.fsync(fh, data_only=datasync)

    # -- folders --------------------------------------------------------------------------

    @answered
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a folder. Its names are listed at the first read."""
        handle = self._next_listing
        self._next_listing += 1
        self._listings[handle] = [(b"", inode)]
        return pyfuse3.FileHandleT(handle)

    @answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """List a folder as it was when reading began at 0; what is gone since is left out."""
        listing = self._listings[fh]
        ino = listing[0][1]
        virtual = self._is_virtual(ino)
        if start_id == 0:
            if virtual:
                names = await self._virtual.list_folder(ino)
            else:
                assert self._volume is not None, "not virtual"
                names = [*self._virtual.listed(ino), *self._volume.list_folder(ino)]
            self._listings[fh] = listing = [listing[0], *names]
        for position in range(max(start_id, 0) + 1, len(listing)):
            name, child = listing[position]
            if virtual or child >= VIRTUAL_INO_MIN:
                entry = self._node(self._virtual.get(child))
            else:
                assert self._volume is not None, "not virtual"
                try:
                    entry = self._attributes(self._volume.find(ino, name))
                except FileNotFoundError:
                    continue
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, position):
                return
            if self._volume is not None and entry.st_ino < VIRTUAL_INO_MIN:
                self._volume.remember(entry.st_ino)

    @answered
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a folder."""
        self._listings.pop(fh, None)

    @answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Make a folder durable."""
        if self._volume is not None:
            await self._volume.sync_journal()

    @answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        """Free space of the disk that holds the state directory."""
        found = self._virtual.statvfs()
        data = pyfuse3.StatvfsData()
        data.f_bsize, data.f_frsize = found.f_bsize, found.f_frsize
        data.f_blocks, data.f_bfree, data.f_bavail = found.f_blocks, found.f_bfree, found.f_bavail
        data.f_files, data.f_ffree, data.f_favail = found.f_files, found.f_ffree, found.f_favail
        data.f_namemax = 255
        return data

    # -- extended attributes --------------------------------------------------------------

    @answered
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """One extended attribute; without the option the kernel stops asking (ENOSYS)."""
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        value = await self._virtual.xattr(inode, bytes(name))
        if value is None and not self._is_virtual(inode):
            assert self._volume is not None, "not virtual"
            value = self._volume.get_xattr(inode, name)
        if value is None:
            raise FUSEError(errno.ENODATA)
        return value

    @answered
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """Names of the extended attributes."""
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        if self._is_virtual(inode):
            return []
        assert self._volume is not None, "not virtual"
        return [pyfuse3.XAttrNameT(n) for n in self._volume.journal.list_xattrs(inode)]

    @answered
    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext
    ) -> None:
        """Set an extended attribute."""
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        if name.startswith(b"user.hpkfs."):
            raise FUSEError(errno.EPERM)
        if not name.startswith(XATTR_NAMESPACES):
            raise FUSEError(errno.EOPNOTSUPP)
        self._writable(inode).set_xattr(inode, name, value)

    @answered
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """Remove an extended attribute."""
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        if name.startswith(b"user.hpkfs."):
            raise FUSEError(errno.EPERM)
        self._writable(inode).remove_xattr(inode, name)
