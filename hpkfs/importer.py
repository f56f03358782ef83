"""New agents: from nothing, or from an existing Hermes home.

Called by `hpkfs init` and `hpkfs adopt`. The source is only read. What travels becomes the first
checkpoint; everything else becomes this machine's local zone and never reaches the store. `adopt`
then moves the source aside, once every byte has been compared; before that it can fail at any
point and the home is as it was.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from hpkfs import mountpoint, places
from hpkfs.agent import Agent, AgentOptions
from hpkfs.connection import open_store
from hpkfs.copier import WORKSPACE, Copier
from hpkfs.core.ids import is_agent_id
from hpkfs.core.limits import MAX_HEAD
from hpkfs.core.policy import Rule
from hpkfs.core.uris import FileStore
from hpkfs.errors import BusyError, IntegrityError, MissingObjectError, UsageError
from hpkfs.inodes import ROOT_INO
from hpkfs.survey import shown
from hpkfs.transport.local import LocalTransport
from hpkfs.volume import Caller

if TYPE_CHECKING:
    from hpkfs.core.uris import StoreUri
    from hpkfs.transport.base import Transport

BEFORE_SUFFIX = ".before-hpkfs"
NAMED_MAX = 5
STORE_NAMES = ("head.json", "head.lock", "snapshots", "objects")
UNTOUCHED = "The directory is as it was."

STARTER_FILES = {
    "SOUL.md": "# Who you are\n\nYou are a helpful agent. Edit this file to say who you are.\n",
    "memories/MEMORY.md": "",
    "memories/USER.md": "",
    "workspace/AGENTS.md": (
        "# This workspace\n\nNotes for agents that work here: what the project is, how to build"
        " and test it.\n"
    ),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What a new agent is made from.

    Attributes:
        home: an existing Hermes home, or None.
        workspace: an existing workspace that lies elsewhere, or None.
        agent_id: the new agent's id; None for the usual one.
        adopt: move the home aside at the end; the agent will be mounted in its place.
    """

    home: str | None = None
    workspace: str | None = None
    agent_id: str | None = None
    adopt: bool = False


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
        `local_files`, `local_names` (top-level), `travels` (paths), `kept_local`, `skipped`.

    Raises:
        UsageError: the store has an agent already; nothing was touched.
    """
    store, at = places.resolve_uri(uri)
    if at is not None:
        raise UsageError("A new agent has no earlier checkpoint; leave out the `@`.")
    source = Source(from_home, workspace, agent_id)
    return trio.run(_init, store, source, places.state_dir(store, state_dir))


def adopt(directory: str, uri: str, state_dir: str | None) -> dict[str, object]:
    """Make a new agent from a home, and leave an empty directory in the home's place.

    The home is kept beside it as `DIR.before-hpkfs`. Everything in it has been compared with the
    copy before that, byte by byte.

    Args:
        directory: the home; absolute, links resolved.
        uri: the new agent's store.
        state_dir: this machine's state directory, where the user named one.

    Returns:
        What `init_store` returns, and `before`: where the home is now.

    Raises:
        UsageError: the home cannot be adopted.
        BusyError: a program has files of the home open, or changed some meanwhile.
        HpkfsError: the copy failed. In every case the home is as it was.
    """
    store, _ = places.resolve_uri(uri)
    state = places.state_dir(store, state_dir)
    _check_adoptable(directory, store, state)
    return trio.run(_init, store, Source(directory, adopt=True), state)


class _Made:
    """What making an agent added to the disk, to be taken away when it fails.

    Objects without a head stay: another process may be making an agent there.
    """

    def __init__(self, store: StoreUri, state_dir: str) -> None:
        self._state = os.path.join(state_dir, places.OUR_FOLDER)
        self._store = store.path if isinstance(store, FileStore) else ""
        self._has_state = True
        self._has_store = not self._store or bool(_names(self._store))
        self.is_published = False

    def look_at_state(self) -> None:
        """Note whether the state directory is new; called with its lock held."""
        self._has_state = os.path.lexists(self._state)

    def remove(self) -> None:
        if not self._has_state:
            shutil.rmtree(self._state, ignore_errors=True)
        if self.is_published and not self._has_store:
            for name in STORE_NAMES:
                path = os.path.join(self._store, name)
                if os.path.isdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                elif os.path.lexists(path):
                    os.unlink(path)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _check_adoptable(directory: str, store: StoreUri, state_dir: str) -> None:
    before = directory + BEFORE_SUFFIX
    if not os.path.lexists(directory) and os.path.isdir(before):
        raise UsageError(
            f"{directory} is not there, and {before} is: it was adopted before.",
            kept="Nothing was touched.",
            next_step=f"Bring it back with `mv {shlex.quote(before)} {shlex.quote(directory)}`.",
        )
    if mountpoint.mount_on(directory) is not None:
        raise UsageError(
            f"Something is mounted on {directory}.",
            kept="Nothing was touched.",
            next_step="`hpkfs list` shows whether it is an agent already.",
        )
    _check_source(directory)
    if os.path.lexists(before):
        raise UsageError(
            f"{before} exists, and the home would be kept under this name.",
            kept="Nothing was touched.",
            next_step="Move it away.",
        )
    inner = [state_dir, *([store.path] if isinstance(store, FileStore) else [])]
    for path in inner:
        if os.path.commonpath((path, directory)) in (path, directory):
            raise UsageError(
                f"{path} and {directory}, which is going to be moved, lie one in the other.",
                kept="Nothing was touched.",
                next_step="Name another place for it.",
            )
    if not os.access(os.path.dirname(directory), os.W_OK | os.X_OK):
        raise UsageError(
            f"You may not rename {directory}, because of the folder that it is in.",
            kept="Nothing was touched.",
            next_step="Use `hpkfs init` with --from-home, and mount elsewhere.",
        )
    _check_unused(directory)


def _check_unused(directory: str) -> None:
    """Refuse a home that a program is writing to: what it writes later would be lost."""
    holders = _holders(directory)
    if holders:
        raise BusyError(
            f"{directory} is in use by {', '.join(holders[:NAMED_MAX])}.",
            kept=UNTOUCHED,
            next_step="End Hermes and its gateway, and try again.",
        )


def _holders(directory: str) -> list[str]:
    """Other processes with open files below a directory, as far as this user may see."""
    found = []
    inside = os.path.realpath(directory).rstrip("/") + "/"
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                command = file.read().strip()
        except OSError:
            continue  # it ended, or is not ours to look into
        if any(link.startswith(inside) for link in links):
            found.append(f"process {pid} ({command})")
    return found


def _move_aside(directory: str) -> str:
    """Rename the home and make an empty directory like it; undone where that fails."""
    before = directory + BEFORE_SUFFIX
    found = os.stat(directory)
    os.rename(directory, before)
    try:
        os.mkdir(directory, 0o700)
        os.chmod(directory, stat.S_IMODE(found.st_mode))
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(directory, found.st_uid, found.st_gid)
        os.sync()
    except BaseException:
        if os.path.isdir(directory):
            os.rmdir(directory)
        os.rename(before, directory)
        raise
    return before


def put_back(directory: str) -> None:
    """Undo `adopt` in a directory that is not mounted: the home is in its place again.

    Raises:
        OSError: the directory holds more than a bare mountpoint does; nothing is lost.
    """
    for name in mountpoint.MARKERS:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    os.rmdir(directory)
    os.rename(directory + BEFORE_SUFFIX, directory)


async def _init(store: StoreUri, source: Source, state_dir: str) -> dict[str, object]:
    agent_id = source.agent_id or "default"
    if not is_agent_id(agent_id):
        raise UsageError(
            f"{agent_id!r} cannot be an agent id.",
            next_step="Use a to z, 0 to 9, - and _, at most 64, the first a letter or digit.",
        )
    for folder in filter(None, (source.home, source.workspace)):
        _check_source(folder)
    made = _Made(store, state_dir)
    transport = open_store(store, state_dir=state_dir, create=True)
    if await _has_head(transport):
        await transport.aclose()
        raise UsageError(
            f"There is an agent in {store} already.",
            kept="Nothing was touched.",
            next_step=(
                f"Mount it with `hpkfs mount {store} DIRECTORY`, or name another folder for a "
                "new agent."
            ),
        )
    with places.RunLock(state_dir):
        options = AgentOptions(
            uri=str(store),
            state_dir=state_dir,
            device_id=places.device_id(state_dir),
            mountpoint=source.home if source.adopt else None,
        )
        made.look_at_state()
        try:
            agent = await _open_empty(options, transport)
            try:
                return await _fill(agent, agent_id, source, made)
            finally:
                await agent.close()
        except BaseException:
            made.remove()
            raise


async def _open_empty(options: AgentOptions, transport: Transport) -> Agent:
    """Open a state directory that no agent has been in.

    Files without a checkpoint are what an interrupted `init` left: they are copies, and go.
    """
    agent = Agent(options, transport)
    if agent.installer.base() is None and agent.volume.list_folder(ROOT_INO):
        await agent.close()
        await trio.to_thread.run_sync(shutil.rmtree, agent.folder)
        agent = Agent(options, transport)
    if agent.installer.base() is not None:
        await agent.close()
        raise UsageError(
            f"The state directory {options.state_dir} holds another agent's files.",
            kept="Nothing was touched.",
            next_step="Name another one with --state-dir.",
        )
    return agent


async def _has_head(transport: Transport) -> bool:
    try:
        await transport.get("head.json", limit=MAX_HEAD)
    except MissingObjectError:
        return False
    return True


async def _fill(agent: Agent, agent_id: str, source: Source, made: _Made) -> dict[str, object]:
    agent.set_owner(agent_id)
    copier = Copier(
        agent.volume,
        exclude=(agent.options.state_dir, _root(agent)),
        workspaces=() if source.adopt else _workspaces(source),
    )
    await trio.to_thread.run_sync(_copy, copier, source)
    if source.home is None:
        await _write_starters(agent, has_workspace=source.workspace is not None)
    agent.journal.log(time.time_ns(), "init", agent.options.uri)
    agent.volume.changed_since = agent.volume.changed_last = time.monotonic()
    result = await agent.sync(pull=False)
    made.is_published = True
    travels = _travelling(agent)
    told: dict[str, object] = {
        "uri": agent.options.uri,
        "agent_id": agent_id,
        "snapshot_id": result["sealed"],
        "state_dir": agent.options.state_dir,
        "state": result["state"],
        "exit_code": result["exit_code"],
        "detail": result["detail"],
        "files": len(travels),
        "local_files": max(copier.done.files - len(travels), 0),
        "local_names": _local_names(agent, travels),
        "travels": travels,
        "kept_local": agent.status()["kept_local"],
        "skipped": [{"path": p, "reason": r} for p, r in copier.done.skipped],
    }
    if source.adopt:
        assert source.home is not None, "a home is adopted"
        told["before"] = await trio.to_thread.run_sync(_finish_adoption, agent, copier, source.home)
    return told


def _local_names(agent: Agent, travels: list[str]) -> list[str]:
    """Top-level names with nothing in the checkpoint; a folder has a slash."""
    tops = {path.partition("/")[0] for path in travels}
    names = []
    for name, inode in agent.volume.walk_folder(ROOT_INO):
        path = os.fsdecode(name)
        decision = agent.volume.policy.decide(path, is_folder=inode.is_folder)
        if path not in tops and path != "memories" and decision.rule is not Rule.TRAVELLING:
            names.append(shown(path) + "/" * inode.is_folder)
    return names


def _travelling(agent: Agent) -> list[str]:
    """The paths of the tree whose files are in the first checkpoint."""
    base = agent.installer.base()
    stored = base[0].files if base else {}
    found = agent.sealer.survey().files.items()
    return sorted(entry.path for logical, entry in found if logical in stored)


def _workspaces(source: Source) -> tuple[str, ...]:
    """The folders whose conversations will be at home in the agent's workspace."""
    found = source.workspace
    if found is None and source.home is not None:
        found = os.path.join(source.home, WORKSPACE)
    return () if found is None else (os.path.abspath(found), os.path.realpath(found))


def _copy(copier: Copier, source: Source) -> None:
    if source.home is not None:
        has_workspace = source.workspace is not None
        copier.tree(source.home, "", leave_out=(WORKSPACE,) if has_workspace else ())
    if source.workspace is not None:
        copier.tree(source.workspace, WORKSPACE)
    elif source.home is not None and not os.path.lexists(os.path.join(source.home, WORKSPACE)):
        copier.empty_folder(WORKSPACE, source.home)
    copier.flush()


def _finish_adoption(agent: Agent, copier: Copier, directory: str) -> str:
    """Compare, then move aside; the last things that can fail."""
    state, detail = agent.state()
    if state != "clean":
        raise IntegrityError(
            f"What travels of {directory} is not safely on the store ({state}). {detail}",
            kept=UNTOUCHED,
            next_step="Mend that first, or use `hpkfs init` with --from-home.",
        )
    different = copier.differences(directory)
    _check_unused(directory)
    if different:
        raise BusyError(
            f"{directory} changed while it was copied: {', '.join(different[:NAMED_MAX])}.",
            kept=UNTOUCHED,
            next_step="End Hermes and its gateway, and try again.",
        )
    return _move_aside(directory)


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
    if os.path.lexists(os.path.join(path, mountpoint.TEXT_MARKER)):
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
