"""The commands that make an agent, mount and unmount it.

`cli.py` calls them with the parsed arguments; each returns the exit code. A mount forks its
daemon here, before anything that a mount needs is imported.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from hpkfs import mountpoint, places, show
from hpkfs.arguments import parse_checkpoint, parse_listed, parse_seconds, parse_size
from hpkfs.client import ControlClient, find_daemon, find_mount
from hpkfs.commands import absolute, exit_code, not_mounted
from hpkfs.core.uris import FileStore, PubkyTemplate
from hpkfs.errors import BusyError, TransientError, UsageError
from hpkfs.options import EXIT_CODES, MountOptions
from hpkfs.terminal import Progress, print_result, say, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from hpkfs.core.uris import StoreUri

FORCE_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 10.0


def init(args: argparse.Namespace) -> int:
    """Make a new store."""
    from hpkfs import importer

    store, at = places.resolve_uri(args.uri)
    if at is not None:
        raise UsageError("A new agent has no checkpoint yet.", next_step="Leave out the @ part.")
    result = importer.init_store(
        str(store),
        from_home=absolute(args.from_home),
        workspace=absolute(args.workspace),
        agent_id=args.agent_id,
        state_dir=absolute(args.state_dir),
    )
    places.note_store(places.state_dir(store, args.state_dir), str(store))
    print_result(result, show.made(result), as_json=args.json)
    return exit_code(result)


def adopt(args: argparse.Namespace) -> int:
    """Turn an existing home into a mount."""
    from hpkfs import importer

    directory = mountpoint.resolve(args.directory)
    if os.path.exists(os.path.join(directory, "head.json")):
        raise UsageError(
            f"{directory} is a store and no agent's home.",
            kept="Nothing was touched.",
            next_step=f"Mount it with `hpkfs mount {shlex.quote(directory)} DIRECTORY`.",
        )
    if args.uri is None:
        name = os.path.basename(directory).lstrip(".") or "agent"
        args.uri = os.path.join(places.home(), "agents", name)
    store, at = places.resolve_uri(args.uri)
    if at is not None:
        raise UsageError("A new agent has no checkpoint yet.", next_step="Leave out the @ part.")
    _check_can_mount(allow_other=False)
    state_dir = absolute(args.state_dir)
    result = importer.adopt(directory, str(store), state_dir)
    places.note_store(places.state_dir(store, state_dir), str(store))
    quoted = shlex.quote(directory)
    # A mount that is busy must not be touched, one that is gone must not stop the rest.
    undo = (
        f"{{ hpkfs umount {quoted} || ! mountpoint -q {quoted}; }} && "
        f"rm -f {quoted}/cron {quoted}/NOT-MOUNTED.txt && "
        f"rmdir {quoted} && mv {shlex.quote(directory + '.before-hpkfs')} {quoted}"
    )
    result = {"undo": undo, **result}
    print_result(
        result, [*show.made(result), "To undo this:", f"  {result['undo']}"], as_json=args.json
    )
    sys.stdout.flush()
    named = ["--state-dir", state_dir] if state_dir else []
    command = [sys.executable, "-m", "hpkfs.cli", "mount", str(store), directory, *named]
    # A process of its own, since a daemon forks before anything heavy is imported.
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code != 0 and mountpoint.mount_on(directory) is None:
        importer.put_back(directory)
        warn(
            f"{directory} is as it was, because it could not be mounted. Remove the store "
            f"{store} and {result['state_dir']} before you try again."
        )
    return code


def mount(args: argparse.Namespace) -> int:
    """Mount, and leave a daemon behind or serve in the foreground."""
    options, store = mount_options(args)
    state_dir = places.state_dir(store, options.state_dir)
    _check_apart(options.mountpoint, state_dir, store)
    _check_can_mount(allow_other=options.allow_other)
    _check_not_mounted(options, state_dir)

    def run(ready: Callable[[dict[str, object]], None]) -> int:
        return _serve(options, state_dir, ready)

    from hpkfs import background

    if options.foreground:
        background.set_up_log(None)

        def ready(result: dict[str, object]) -> None:
            _print_mounted(result)
            background.notify_systemd(f"READY=1\nSTATUS=Mounted on {options.mountpoint}")

        return run(ready)
    log_folder = os.path.join(state_dir, places.OUR_FOLDER)
    places.make_private(log_folder)
    _print_mounted(background.start(run, log_path=os.path.join(log_folder, "daemon.log")))
    return 0


def mount_options(args: argparse.Namespace) -> tuple[MountOptions, StoreUri]:
    """Put together what the arguments and the `-o` lists of `mount` say; arguments win."""
    now = datetime.now().astimezone()
    said = parse_listed(args.listed, now=now).said()
    for name in ("read_only", "offline", "lazy"):
        if getattr(args, name):
            said[name] = True
    if args.cache_size is not None:
        said["cache_size_bytes"] = parse_size(args.cache_size)
    if args.seal_after is not None:
        said["seal_after_s"] = parse_seconds(args.seal_after)
    if args.at is not None:
        said["at"] = parse_checkpoint(args.at, now=now)
    if args.state_dir is not None:
        said["state_dir"] = args.state_dir
    at, state_dir = said.pop("at", None), said.pop("state_dir", None)
    assert at is None or isinstance(at, str)
    assert state_dir is None or isinstance(state_dir, str)
    store, at = places.resolve_uri(args.uri, at=at)
    if isinstance(store, PubkyTemplate):
        said["read_only"] = True
    options = MountOptions(
        uri=str(store),
        mountpoint=mountpoint.resolve(args.mountpoint),
        at=at,
        state_dir=absolute(state_dir),
        foreground=args.foreground,
        **said,  # type: ignore[arg-type]  # ListedOptions has the same fields and types
    )
    return options, store


def _check_apart(where: str, state_dir: str, store: StoreUri) -> None:
    inner = {"The state directory": state_dir}
    if isinstance(store, FileStore):
        inner["The store"] = store.path
    for what, path in inner.items():
        if _is_within(path, where) or _is_within(where, path):
            raise UsageError(
                f"{what} {path} and the mountpoint {where} lie one in the other.",
                kept="Nothing was changed.",
                next_step="Choose another mountpoint.",
            )


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _check_can_mount(*, allow_other: bool) -> None:
    """Say at once what this machine lacks, with its remedy."""
    from hpkfs import doctor

    for finding in doctor.examine_mount(allow_other=allow_other):
        if not finding.ok:
            raise UsageError(
                f"This machine cannot mount: {finding.detail}.",
                kept="Nothing was changed.",
                next_step=finding.remedy,
            )


def _check_not_mounted(options: MountOptions, state_dir: str) -> None:
    if options.read_only or options.at is not None:
        return
    record = find_daemon(state_dir)
    if record is not None:
        raise BusyError(
            f"This agent is mounted on {record.mountpoint} already, by process {record.pid}.",
            kept="Nothing was changed.",
            next_step="Use it there, unmount it first, or mount it here with --read-only as well.",
        )


def _serve(
    options: MountOptions, state_dir: str, ready: Callable[[dict[str, object]], None]
) -> int:
    """Make the directory ready, mount, and serve to the end. Runs in the daemon."""
    recovery = os.path.join(state_dir, places.OUR_FOLDER, "recovery")
    prepared = mountpoint.prepare(options.mountpoint, uri=options.uri, recovery_dir=recovery)
    is_mounted = False

    def mounted(record: dict[str, object]) -> None:
        nonlocal is_mounted
        is_mounted = True
        places.note_store(state_dir, options.uri)
        ready({**record, "cleared": prepared.cleared, "moved_to": prepared.moved_to})

    try:
        from hpkfs import mount

        return mount.run_mount(options, ready=mounted)
    finally:
        if not is_mounted:
            mountpoint.undo(prepared)


def _print_mounted(result: dict[str, Any]) -> None:
    if result.get("cleared"):
        warn("A dead mount in the way was cleared.")
    if result.get("moved_to"):
        left = f"What lay in the bare directory is now in {result['moved_to']}."
        warn(show.clean(left))
    if result.get("state") not in {None, "clean", "dirty", "pending"}:
        warn(show.clean(f"The state is {result['state']}: {result.get('detail')}"))
    if result.get("read_only"):
        say(show.clean(f"Mounted read-only on {result['mountpoint']}."))
    else:
        say(show.clean(f"Mounted. Start Hermes on it: {show.start_line(result['mountpoint'])}"))
    sys.stdout.flush()


def umount(args: argparse.Namespace) -> int:
    """Unmount through the daemon, or clear what a dead one left."""
    record = find_mount(args.mountpoint)
    if record is None:
        return _umount_orphan(args)
    os.chdir("/")  # our own current folder must not keep it busy
    request = {"wait": args.wait, "publish": not args.no_publish, "force": args.force}
    timeout_s = FORCE_TIMEOUT_S if args.force and not args.wait else None
    with _process_end(record.pid):
        try:
            result = ControlClient(record.socket_path).request(
                "umount", timeout_s=timeout_s, on_progress=Progress("Sending"), **request
            )
        except TransientError:
            if not args.force or mountpoint.mount_on(record.mountpoint) is None:
                raise
            mountpoint.detach(record.mountpoint)
            raise
    line = f"Unmounted {record.mountpoint}."
    if not record.read_only:
        line += f" {show.outcome(result)}"
    print_result(result, [line], as_json=args.json)
    return exit_code(result)


def _umount_orphan(args: argparse.Namespace) -> int:
    """Unmount what no daemon of this user answers for: a dead mount, or a lost register."""
    there = mountpoint.mount_around(mountpoint.resolve(args.mountpoint))
    if there is None:
        raise not_mounted(args.mountpoint)
    dead = mountpoint.is_dead(there.path)
    if dead or args.force:
        mountpoint.detach(there.path)
    else:
        mountpoint.unmount(there.path)
    detail = f"The mount on {there.path} had lost its daemon and was cleared." if dead else ""
    detail = detail or f"Unmounted {there.path}; its daemon could not be asked how the state is."
    result = {"state": "dirty", "exit_code": EXIT_CODES["dirty"], "detail": detail}
    kept = "What was written is safe on this machine; mount the agent again to go on."
    print_result(result, [f"{detail} {kept}"], as_json=args.json)
    return exit_code(result)


@contextlib.contextmanager
def _process_end(pid: int) -> Iterator[None]:
    """On leaving without an error, wait until a process has ended, so that all is let go."""
    import select

    try:
        watched = os.pidfd_open(pid)
    except OSError:
        yield
        return
    try:
        yield
        select.select([watched], [], [], END_TIMEOUT_S)
    finally:
        os.close(watched)
