"""The directory that is mounted on: look, make ready, unmount. All sync.

The command line and the daemon call it. What the kernel says in `/proc` is read first, and a path
inside a mount is never touched: a daemon that is stopped would hold the caller for good. The one
exception is the mountpoint itself, asked in a thread that is left behind when it hangs.

A stopped daemon leaves the bare directory below. Hermes must not fill that with a new agent, so
before mounting two files are put there: `cron`, on which Hermes fails to start because it wants a
folder of that name, and `NOT-MOUNTED.txt`, which says why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import stat
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hpkfs.errors import BusyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILESYSTEM_TYPE: Final = "fuse.hpkfs"
CRON_MARKER: Final = "cron"
TEXT_MARKER: Final = "NOT-MOUNTED.txt"
MARKERS: Final = (CRON_MARKER, TEXT_MARKER)
MARKER_TEXT: Final = """\
The agent that belongs here is not mounted, so its files are not here.
`hpkfs list` shows where agents are mounted; `hpkfs mount` mounts this one again.
Nothing is lost. This file and the file `cron` beside it keep Hermes from starting
a new, empty agent here. To use the directory for something else, delete both.
"""
AGENT_LINE: Final = "Agent: "
MARKER_BYTES_MAX: Final = 64 * 1024
UNMOUNT_TIMEOUT_S: Final = 60.0
PROBE_TIMEOUT_S: Final = 5.0
DEAD_LAYERS_MAX: Final = 16
LINKS_MAX: Final = 40
HOLDERS_NAMED_MAX: Final = 8
ROOT_ID: Final = 0


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of `/proc/self/mountinfo` (proc(5)).

    Attributes:
        mount_id: the kernel's number of this mount.
        device: the device number as `major:minor`.
        path: where it is mounted.
        filesystem_type: the type with its subtype, as in `fuse.hpkfs`.
        source: what is mounted; for a mount of ours, the address of the store.
    """

    mount_id: int
    device: str
    path: str
    filesystem_type: str
    source: str

    @property
    def is_ours(self) -> bool:
        """Whether hpkfs made it."""
        return self.filesystem_type == FILESYSTEM_TYPE


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a mount busy, and the path by which it does."""

    pid: int
    command: str
    path: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done to make a directory ready.

    Attributes:
        path: the directory, absolute, links resolved.
        cleared: a dead mount was taken away.
        created: the directory was made.
        marked: the markers were written.
        named_before: the store that the marker named, where it now names another one.
        moved_to: where leftovers are now; None when there were none.
    """

    path: str
    cleared: bool = False
    created: bool = False
    marked: bool = False
    named_before: str | None = None
    moved_to: str | None = None


# -- looking ---------------------------------------------------------------------------------


def mounts() -> list[Mount]:
    """Return what is mounted in this namespace, in the kernel's order."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def parse_mountinfo(data: bytes) -> list[Mount]:
    """Parse the text of `/proc/self/mountinfo`; lines of another shape are left out."""
    found = []
    for line in data.split(b"\n"):
        front, separator, back = line.partition(b" - ")
        fields, types = front.split(b" "), back.split(b" ")
        if separator and len(fields) >= 6 and len(types) >= 2 and fields[0].isdigit():
            found.append(
                Mount(
                    int(fields[0]),
                    fields[2].decode("ascii", "replace"),
                    _unescape(fields[4]),
                    _unescape(types[0]),
                    _unescape(types[1]),
                )
            )
    return found


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda m: bytes([int(m[1], 8)]), field))


def mount_on(path: str, table: Sequence[Mount] | None = None) -> Mount | None:
    """Return the topmost mount on exactly this path."""
    on_path = [mount for mount in (mounts() if table is None else table) if mount.path == path]
    return on_path[-1] if on_path else None


def mount_around(path: str, table: Sequence[Mount] | None = None) -> Mount | None:
    """Return our mount on this path or on a folder above it."""
    table = mounts() if table is None else table
    while True:
        found = mount_on(path, table)
        if found is not None and found.is_ours:
            return found
        if path == "/":
            return None
        path = os.path.dirname(path)


def device_of(path: str) -> str | None:
    """Return the device number of the mount on a path, as `major:minor`."""
    found = mount_on(path)
    return found.device if found is not None else None


def resolve(path: str, table: Sequence[Mount] | None = None) -> str:
    """Make a path absolute and follow links, but none inside a mount of ours.

    What lies inside one is taken as it is written, since its daemon may not answer.
    """
    ours = {mount.path for mount in (mounts() if table is None else table) if mount.is_ours}
    left = os.path.join(os.getcwd(), path).split("/")[::-1]
    done, links = "/", 0
    while left:
        part = left.pop()
        if part in {"", "."}:
            continue
        if part == "..":
            done = os.path.dirname(done)
            continue
        done = os.path.join(done, part)
        if done in ours:
            return os.path.normpath(os.path.join(done, *left[::-1])) if left else done
        target = _link_target(done)
        if target is not None:
            links += 1
            if links > LINKS_MAX:
                raise UsageError(f"{path}: too many links.")
            done = "/" if target.startswith("/") else os.path.dirname(done)
            left += target.split("/")[::-1]
    return done


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def probe(path: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """Ask the file system on a mountpoint for its free space.

    The attributes would not do: the kernel may know them and answer for a dead daemon.

    Returns:
        0 when it answers, the errno of the answer, or None when none came in time.
    """
    answers: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(path)
        except OSError as error:
            answers.append(error.errno or errno.EIO)
        else:
            answers.append(0)

    thread = threading.Thread(target=ask, name="hpkfs-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def is_dead(path: str) -> bool:
    """Tell whether a mount on the path has lost its daemon."""
    return mount_on(path) is not None and probe(path) == errno.ENOTCONN


# -- making ready ------------------------------------------------------------------------------


def prepare(path: str, *, uri: str, recovery_dir: str) -> Prepared:
    """Make a directory ready to be mounted on.

    A dead mount of ours is cleared, a missing directory is made, the markers are written, and
    leftovers beside markers go to `recovery_dir`.

    Args:
        path: the directory.
        uri: the store that will be mounted, for messages.
        recovery_dir: where leftovers go; made when needed.

    Raises:
        BusyError: something is mounted there.
        UsageError: it is no directory, or holds files of someone.
    """
    path = resolve(path)
    cleared = _clear_dead(path, uri=uri)
    created = _make_directory(path)
    names = _names(path)
    leftovers = [name for name in names if not _is_marker(path, name)]
    if leftovers and not all(_is_marker(path, marker) for marker in MARKERS):
        raise _not_empty(path, leftovers)
    moved_to = _move_away(path, leftovers, recovery_dir) if leftovers else None
    named_before = bare_uri(path)
    marked = _mark(path, uri)
    if marked or named_before == uri:
        named_before = None
    return Prepared(path, cleared, created, marked, named_before, moved_to)


def undo(prepared: Prepared) -> None:
    """Take back what `prepare` added, after a mount that did not come about."""
    if mount_on(prepared.path) is not None:
        return
    with contextlib.suppress(OSError, UsageError):
        if prepared.named_before is not None:
            _mark(prepared.path, prepared.named_before)
        if prepared.marked:
            for name in MARKERS:
                os.unlink(os.path.join(prepared.path, name))
        if prepared.created:
            os.rmdir(prepared.path)


def _clear_dead(path: str, *, uri: str) -> bool:
    cleared = False
    for _ in range(DEAD_LAYERS_MAX):
        there = mount_on(path)
        if there is None or (not there.is_ours and not _is_fuse(there)):
            return cleared
        answer = probe(path)
        if answer != errno.ENOTCONN:
            raise _mounted_already(path, there, uri=uri, answers=answer is not None)
        if not there.is_ours:
            raise UsageError(
                f"A dead {there.filesystem_type} mount, which is not ours, is on {path}.",
                kept="Nothing was changed.",
                next_step=f"Clear it with `fusermount3 -uz {shlex.quote(path)}`, then try again.",
            )
        detach(path)
        cleared = True
    raise BusyError(f"More than {DEAD_LAYERS_MAX} dead mounts lie on {path}.")


def _is_fuse(mount: Mount) -> bool:
    return mount.filesystem_type == "fuse" or mount.filesystem_type.startswith("fuse.")


def _mounted_already(path: str, there: Mount, *, uri: str, answers: bool) -> BusyError:
    if not there.is_ours:
        return BusyError(
            f"A {there.filesystem_type} file system is mounted on {path} already.",
            kept="Nothing was changed.",
            next_step="Choose another directory.",
        )
    what = "This agent" if there.source == uri else f"Another agent, {there.source},"
    if not answers:
        return BusyError(
            f"{what} is mounted on {path} already, and its daemon does not answer.",
            kept="Nothing was changed.",
            next_step=f"`hpkfs umount --force {shlex.quote(path)}` detaches it.",
        )
    return BusyError(
        f"{what} is mounted on {path} already.",
        kept="Nothing was changed.",
        next_step=f"Use it as it is, or run `hpkfs umount {shlex.quote(path)}` first.",
    )


def _make_directory(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise UsageError(
                f"{path} is not a directory.",
                kept="Nothing was changed.",
                next_step="Choose an empty directory, or a name that does not exist yet.",
            ) from None
        return False
    except FileNotFoundError:
        folder = os.path.dirname(path)
        raise UsageError(
            f"{folder} does not exist.",
            kept="Nothing was changed.",
            next_step=f"Make it with `mkdir -p {shlex.quote(folder)}`, then try again.",
        ) from None
    except OSError as error:
        raise _unusable(path, error) from error
    return True


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise _unusable(path, error) from error


def _is_marker(path: str, name: str) -> bool:
    if name not in MARKERS:
        return False
    try:
        return stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode)
    except OSError:
        return False


def _not_empty(path: str, names: Sequence[str]) -> UsageError:
    some = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
    quoted = shlex.quote(path)
    return UsageError(
        f"{path} is not empty: it holds {some}.",
        kept="Nothing was changed.",
        next_step=(
            f"If it is an agent's home, `hpkfs adopt {quoted}` turns it into a mount, and "
            f"`hpkfs init URI --from-home {quoted}` copies it into a store; else choose an "
            "empty directory."
        ),
    )


def _unusable(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be mounted on: {os.strerror(error.errno or errno.EIO)}.",
        kept="Nothing was changed.",
        next_step="Choose a directory of yours.",
    )


def _move_away(path: str, names: Sequence[str], recovery_dir: str) -> str:
    """Move what someone left on the bare directory to a new folder of `recovery_dir`."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    os.makedirs(recovery_dir, mode=0o700, exist_ok=True)
    for number in range(1, 1_000):
        target = os.path.join(recovery_dir, f"{stamp}-bare-mountpoint-{number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(target, 0o700)
            break
    else:
        raise UsageError(f"{recovery_dir} is full of leftovers of this second.")
    try:
        for name in names:
            _move(os.path.join(path, name), os.path.join(target, name))
    except (OSError, shutil.Error) as error:
        raise UsageError(
            f"What lies in {path} could not be moved to {target}: {error}.",
            kept="Nothing was deleted.",
            next_step="Move it away yourself, then try again.",
        ) from error
    return target


def _move(source: str, target: str) -> None:
    """Rename, or between file systems copy, make that durable, and only then delete."""
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True)
        os.sync()
        shutil.rmtree(source)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
        os.sync()
        os.unlink(source)


def bare_uri(path: str) -> str | None:
    """Return the store that the marker in a bare directory names."""
    if not _is_marker(path, TEXT_MARKER):
        return None
    try:
        with open(os.path.join(path, TEXT_MARKER), encoding="utf-8", errors="replace") as file:
            lines = file.read(MARKER_BYTES_MAX).splitlines()
    except OSError:
        return None
    return next((line[len(AGENT_LINE) :] for line in lines if line.startswith(AGENT_LINE)), None)


def _mark(path: str, uri: str) -> bool:
    """Write the markers that are missing or name another store; tell whether one was missing."""
    missing = [name for name in MARKERS if not _is_marker(path, name)]
    try:
        if TEXT_MARKER not in missing and bare_uri(path) != uri:
            os.unlink(os.path.join(path, TEXT_MARKER))
            _write_marker(path, TEXT_MARKER, uri)
        for name in missing:
            _write_marker(path, name, uri)
    except OSError as error:
        if error.errno == errno.EROFS:
            return False  # nobody can fill a read-only directory either
        raise _unusable(path, error) from error
    return bool(missing)


def _write_marker(path: str, name: str, uri: str) -> None:
    with open(os.path.join(path, name), "x", encoding="utf-8") as file:
        file.write(f"{MARKER_TEXT}{AGENT_LINE}{uri}\n")


# -- unmounting --------------------------------------------------------------------------------


def unmount(path: str) -> None:
    """Unmount; the daemon must be serving meanwhile.

    Raises:
        BusyError: processes hold it; the message names them.
        UsageError: nothing of ours is mounted there, or the kernel refuses.
    """
    there = mount_on(path)
    if there is None or not there.is_ours:
        raise _not_mounted(path)
    failure = _fusermount("-u", path)
    if failure is None:
        return
    if "busy" in failure.lower():
        raise busy_error(path)
    raise UsageError(f"{path} could not be unmounted: {failure}.")


def detach(path: str) -> None:
    """Take the mount out of the tree at once; who holds it keeps what is open.

    Raises:
        UsageError: nothing of ours is mounted there, or the kernel refuses.
    """
    there = mount_on(path)
    if there is None or not there.is_ours:
        raise _not_mounted(path)
    failure = _fusermount("-uz", path)
    if failure is not None:
        raise UsageError(f"{path} could not be detached: {failure}.")


def _not_mounted(path: str) -> UsageError:
    return UsageError(
        f"No agent is mounted on {path}.",
        next_step="`hpkfs list` shows what is mounted.",
    )


def _fusermount(option: str, path: str) -> str | None:
    """Run fusermount3, or umount where root lacks it; the failure's text, None when it worked."""
    command = ["fusermount3", option, "--", path]
    if shutil.which("fusermount3") is None:
        if os.geteuid() != ROOT_ID:
            return "the program fusermount3 is missing"
        command = ["umount", *(["--lazy"] if "z" in option else []), "--", path]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            cwd="/",
            timeout=UNMOUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {UNMOUNT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].rstrip(".") if lines else f"{command[0]} ended with {done.returncode}"


def busy_error(path: str) -> BusyError:
    """Return the error that names who holds the mount on a path."""
    held = holders(path)
    named = [f"process {holder.pid} ({holder.command}) by {holder.path}" for holder in held]
    below = [mount.path for mount in mounts() if mount.path.startswith(path + "/")]
    named += [f"the mount on {other}" for other in below]
    shown = ", ".join(named[:HOLDERS_NAMED_MAX]) or "a process that you may not look into"
    if len(named) > HOLDERS_NAMED_MAX:
        shown += f" and {len(named) - HOLDERS_NAMED_MAX} more"
    return BusyError(
        f"{path} is in use by {shown}.",
        kept="It stays mounted, and nothing was changed.",
        next_step="End what uses it, or add --force to detach it.",
    )


def holders(path: str) -> list[Holder]:
    """Return the processes that hold the mount on a path, one path for each.

    Only processes that this user may look into are found. Nothing inside the mount is touched:
    descriptors are compared by the number of their mount, mappings by device, and the
    current folder and the root by the name that the kernel keeps.
    """
    there = mount_on(path)
    if there is None:
        return []
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            held = next(_held_paths(f"/proc/{name}", there), None)
            if held is not None:
                found.append(Holder(int(name), _command(name), held))
    return sorted(found, key=lambda holder: holder.pid)


def _held_paths(process: str, mount: Mount) -> Iterator[str]:
    for link in ("cwd", "root"):
        target = _link_target(f"{process}/{link}")
        if target is not None and (target == mount.path or target.startswith(mount.path + "/")):
            yield target
    yield from _held_descriptors(process, mount)
    yield from _held_mappings(process, mount)


def _held_descriptors(process: str, mount: Mount) -> Iterator[str]:
    wanted = f"mnt_id:\t{mount.mount_id}\n"
    try:
        descriptors = os.listdir(f"{process}/fdinfo")
    except OSError:
        return
    for descriptor in descriptors:
        try:
            with open(f"{process}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as file:
                holds = wanted in file.read()
        except OSError:
            continue  # closed meanwhile
        if holds:
            yield _link_target(f"{process}/fd/{descriptor}") or mount.path


def _held_mappings(process: str, mount: Mount) -> Iterator[str]:
    major, minor = (int(part) for part in mount.device.split(":"))
    device = f"{major:02x}:{minor:02x}".encode("ascii")
    try:
        with open(f"{process}/maps", "rb") as file:
            for line in file:
                fields = line.rstrip(b"\n").split(None, 5)
                if len(fields) == 6 and fields[3] == device:
                    yield os.fsdecode(fields[5])
    except OSError:
        return


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended meanwhile"
