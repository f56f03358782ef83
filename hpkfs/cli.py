"""The command `hpkfs`: read the arguments, ask the daemon or do it here, print, end with a code.

What a command needs and others do not (trio, FUSE,
SQLite) is imported inside it, since every command pays for what is imported here. People's
messages go to stderr where stdout is data.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from hpkfs import __version__, mountpoint, places, show
from hpkfs.arguments import (
    Parser,
    parse_checkpoint,
    parse_listed,
    parse_seconds,
    parse_size,
)
from hpkfs.client import ControlClient, MountRecord, all_mounts, find_mount
from hpkfs.core.uris import FileStore
from hpkfs.errors import BusyError, HpkfsError, TransientError, UsageError
from hpkfs.options import MountOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from hpkfs.core.uris import StoreUri

EXIT_FINDINGS: Final = 6
EXIT_USAGE: Final = 1
EXIT_INTERRUPTED: Final = 130
ANSWER_TIMEOUT_S: Final = 30.0
FORCE_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 10.0
WATCH_S: Final = 2.0
FOLLOW_S: Final = 1.0
LOG_ROWS_DEFAULT: Final = 1_000
PROGRESS_AFTER_S: Final = 1.0
PROGRESS_TERMINAL_S: Final = 0.2
PROGRESS_LINES_S: Final = 5.0
EXIT_CODES: Final = {
    "dirty": 2,
    "pending": 2,
    "conflict": 3,
    "auth-required": 4,
    "quota": 5,
    "corrupt": 6,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments without the program's name; None for those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a test's stream
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # see above
    try:
        return _dispatch(arguments)
    except HpkfsError as error:
        if "--json" in arguments:
            _print_json({"error": _describe(error)})
        print(f"hpkfs: {show.failure(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hpkfs: interrupted; what runs in a daemon goes on.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who reads our output has gone; nothing more can be said, nor at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in {"-V", "--version"}:
        print(f"hpkfs {__version__}")
        return 0
    name = arguments[0]
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(
            f"There is no command {name!r}.", next_step="`hpkfs --help` lists the commands."
        )
    parser = Parser(prog=f"hpkfs {name}", description=command.text)
    command.describe(parser)
    code = command.run(parser.parse_intermixed_args(arguments[1:]))
    sys.stdout.flush()
    return code


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hpkfs COMMAND [ARGUMENTS]",
            "",
            "Shows the saved state of an AI agent as an ordinary directory.",
            "",
            *lines,
            "",
            "`hpkfs COMMAND --help` explains a command. Exit codes: 0 done, 1 usage or refused,",
            "2 saved here and not yet on the store, 3 conflict, 4 authorisation needed, 5 quota,",
            "6 damaged or unsupported.",
        ]
    )


# -- init, adopt -------------------------------------------------------------------------------


def _describe_init(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI", help="a folder, as path or file:// address")
    parser.add_argument("--from-home", metavar="DIR", help="take over this Hermes home (copied)")
    parser.add_argument("--workspace", metavar="DIR", help="take over this workspace (copied)")
    parser.add_argument("--agent-id", metavar="ID", help="the agent's id (default: default)")
    _add_state_dir(parser)
    _add_json(parser)


def _init(args: argparse.Namespace) -> int:
    from hpkfs import importer

    store, at = places.resolve_uri(args.uri)
    if at is not None:
        raise UsageError("A new agent has no checkpoint yet.", next_step="Leave out the @ part.")
    result = importer.init_store(
        str(store),
        from_home=_absolute(args.from_home),
        workspace=_absolute(args.workspace),
        agent_id=args.agent_id,
        state_dir=_absolute(args.state_dir),
    )
    places.note_store(places.state_dir(store, args.state_dir), str(store))
    _print_result(args, result, show.made(result))
    return _exit_code(result)


def _describe_adopt(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the agent's home, such as ~/.hermes")
    parser.add_argument("uri", metavar="URI", nargs="?", help="where its store shall be made")
    _add_state_dir(parser)
    _add_json(parser)


def _adopt(args: argparse.Namespace) -> int:
    from hpkfs import importer

    directory = mountpoint.resolve(args.directory)
    if args.uri is None:
        name = os.path.basename(directory).lstrip(".") or "agent"
        args.uri = os.path.join(places.home(), "agents", name)
    store, _ = places.resolve_uri(args.uri)
    _check_can_mount(allow_other=False)
    state_dir = _absolute(args.state_dir)
    result = importer.adopt(directory, str(store), state_dir)
    places.note_store(places.state_dir(store, state_dir), str(store))
    quoted = shlex.quote(directory)
    undo = (
        f"hpkfs umount {quoted} && rm -f {quoted}/cron {quoted}/NOT-MOUNTED.txt && "
        f"rmdir {quoted} && mv {shlex.quote(directory + '.before-hpkfs')} {quoted}"
    )
    result = {"undo": undo, **result}
    _print_result(args, result, [*show.made(result), "To undo this:", f"  {result['undo']}"])
    sys.stdout.flush()
    named = ["--state-dir", state_dir] if state_dir else []
    command = [sys.executable, "-m", "hpkfs.cli", "mount", str(store), directory, *named]
    # A process of its own, since a daemon forks before anything heavy is imported.
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


# -- mount, umount -----------------------------------------------------------------------------


def _describe_mount(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI", help="the store, such as a folder")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty or new directory")
    parser.add_argument(
        "-o",
        dest="listed",
        metavar="OPT[,OPT…]",
        action="append",
        default=[],
        help="ro, allow_other, uid=N, gid=N, umask=OCTAL, showhistory, xattr, offline, lazy, "
        "cache_size=SIZE, seal_after=SECONDS, state_dir=DIR, at=CHECKPOINT; _netdev, noauto, "
        "x-systemd.*, user and defaults are ignored",
    )
    parser.add_argument("--foreground", action="store_true", help="do not leave the terminal")
    parser.add_argument("--read-only", action="store_true", help="refuse every write")
    parser.add_argument(
        "--at", metavar="SNAPSHOT|TIME", help="show an earlier checkpoint, read-only"
    )
    parser.add_argument("--offline", action="store_true", help="do not talk to the store")
    parser.add_argument("--lazy", action="store_true", help="fetch bytes only when they are read")
    parser.add_argument("--cache-size", metavar="SIZE", help="bound of clean bytes (default: 4G)")
    parser.add_argument(
        "--seal-after", metavar="SECONDS", help="quiet time before a checkpoint (default: 30)"
    )
    _add_state_dir(parser)


def _mount(args: argparse.Namespace) -> int:
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
    if not isinstance(store, FileStore):
        raise UsageError(
            f"{store}: stores on a homeserver are not supported by this version.",
            next_step="Use a folder.",
        )
    options = MountOptions(
        uri=str(store),
        mountpoint=mountpoint.resolve(args.mountpoint),
        at=at,
        state_dir=_absolute(state_dir),
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
    for record in all_mounts():
        if not record.read_only and os.path.realpath(record.state_dir) == state_dir:
            raise BusyError(
                f"This agent is mounted on {record.mountpoint} already, by process {record.pid}.",
                kept="Nothing was changed.",
                next_step=(
                    "Use it there, unmount it first, or mount it here with --read-only as well."
                ),
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
        print("A dead mount in the way was cleared.", file=sys.stderr)
    if result.get("moved_to"):
        left = f"What lay in the bare directory is now in {result['moved_to']}."
        print(show.clean(left), file=sys.stderr)
    print(show.clean(f"Mounted. Start Hermes on it: {show.start_line(result['mountpoint'])}"))
    sys.stdout.flush()


def _describe_umount(parser: Parser) -> None:
    _add_mountpoint(parser)
    parser.add_argument("--wait", action="store_true", help="until everything is on the store")
    parser.add_argument("--no-publish", action="store_true", help="send nothing to the store now")
    parser.add_argument("--force", action="store_true", help="detach it even while programs use it")
    _add_json(parser)


def _umount(args: argparse.Namespace) -> int:
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
    _print_result(args, result, [f"Unmounted {record.mountpoint}. {show.outcome(result)}"])
    return _exit_code(result)


def _umount_orphan(args: argparse.Namespace) -> int:
    """Unmount what no daemon of this user answers for: a dead mount, or a lost register."""
    there = mountpoint.mount_around(mountpoint.resolve(args.mountpoint))
    if there is None:
        raise UsageError(
            f"No agent is mounted on {args.mountpoint}.",
            next_step="`hpkfs list` shows what is mounted.",
        )
    dead = mountpoint.is_dead(there.path)
    if dead or args.force:
        mountpoint.detach(there.path)
    else:
        mountpoint.unmount(there.path)
    detail = f"The mount on {there.path} had lost its daemon and was cleared." if dead else ""
    detail = detail or f"Unmounted {there.path}; its daemon could not be asked how the state is."
    result = {"state": "dirty", "exit_code": EXIT_CODES["dirty"], "detail": detail}
    kept = "What was written is safe on this machine; mount the agent again to go on."
    _print_result(args, result, [f"{detail} {kept}"])
    return _exit_code(result)


@contextlib.contextmanager
def _process_end(pid: int) -> Any:  # a generator; contextlib gives it its type
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


# -- list, status, sync ------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    records = all_mounts()
    mounted = {os.path.realpath(record.state_dir) for record in records if not record.read_only}
    agents: list[dict[str, object]] = [
        {"uri": places.noted_store(path), "state_dir": path, "mounted": path in mounted}
        for path in places.known_state_dirs()
    ]
    result = {"mounts": [_record_fields(record) for record in records], "agents": agents}
    _print_result(args, result, show.mounts(records, agents))
    return 0


def _record_fields(record: MountRecord) -> dict[str, object]:
    names = ("uri", "mountpoint", "state_dir", "pid", "read_only", "started_at")
    return {name: getattr(record, name) for name in names}


def _describe_status(parser: Parser) -> None:
    parser.add_argument("target", metavar="MOUNTPOINT|URI", nargs="?", help="default: the only one")
    _add_paths(parser, "tell the state of these paths only")
    parser.add_argument("--watch", action="store_true", help="again every two seconds")
    parser.add_argument("--metrics", action="store_true", help="counters since the mount")
    parser.add_argument(
        "--what-travels", action="store_true", help="every path that goes to the store"
    )
    _add_state_dir(parser)
    _add_json(parser)


def _status(args: argparse.Namespace) -> int:
    if args.target is None:
        records = all_mounts()
        if len(records) != 1:
            return _list(args)
        args.target = records[0].mountpoint
    while True:
        result, lines = _ask_status(args)
        if args.watch and sys.stdout.isatty() and not args.json:
            print("\x1b[H\x1b[2J", end="")
        _print_result(args, result, lines)
        if not args.watch:
            return _exit_code(result)
        sys.stdout.flush()
        time.sleep(WATCH_S)


def _ask_status(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    record = find_mount(args.target)
    if record is None:
        from hpkfs import offline

        uri, state_dir = _unmounted(args)
        result = offline.status(uri, state_dir)
        return result, show.status(result)
    client = ControlClient(record.socket_path)
    paths = [_relative(record, path) for path in args.paths]
    target = record.inside(mountpoint.resolve(args.target))
    if target and not paths and not os.path.isdir(args.target):
        paths = [target]
    if paths:
        result = client.request("status", timeout_s=ANSWER_TIMEOUT_S, paths=paths)
        return result, show.path_states(result)
    if args.what_travels:
        result = client.request("status", timeout_s=ANSWER_TIMEOUT_S, what="what-travels")
        return result, show.what_travels(result)
    if args.metrics:
        result = client.request("status", timeout_s=ANSWER_TIMEOUT_S, what="metrics")
        return result, show.table(list(result.items()))
    result = client.request("status", timeout_s=ANSWER_TIMEOUT_S)
    return result, show.status(result)


def _describe_sync(parser: Parser) -> None:
    _add_target(parser)
    parser.add_argument("--wait", action="store_true", help="until everything is on the store")
    _add_state_dir(parser)
    _add_json(parser)


def _sync(args: argparse.Namespace) -> int:
    record = find_mount(args.target)
    if record is None:
        from hpkfs import offline

        uri, state_dir = _unmounted(args)
        result = offline.sync(uri, state_dir, wait=args.wait)
    else:
        result = ControlClient(record.socket_path).request(
            "sync", timeout_s=None, on_progress=Progress("Sending"), wait=args.wait, prefer=None
        )
    lines = [f"Checkpoint {result['sealed']}."] if result.get("sealed") else []
    _print_result(args, result, [*lines, show.outcome(result)])
    return _exit_code(result)


# -- history, restore, log ---------------------------------------------------------------------


def _describe_history(parser: Parser) -> None:
    _add_target(parser)
    parser.add_argument("--limit", metavar="N", type=_count, help="the newest N only")
    _add_state_dir(parser)
    _add_json(parser)


def _history(args: argparse.Namespace) -> int:
    record = find_mount(args.target)
    if record is None:
        from hpkfs import offline

        uri, state_dir = _unmounted(args)
        result = offline.history(uri, state_dir, limit=args.limit)
    else:
        result = ControlClient(record.socket_path).request(
            "history", timeout_s=None, limit=args.limit
        )
    _print_result(args, result, show.history(result))
    return 0


def _describe_restore(parser: Parser) -> None:
    _add_mountpoint(parser)
    parser.add_argument(
        "checkpoint",
        metavar="SNAPSHOT|TIME",
        help="digits of an id, or a time: 2026-11-30, 2026-11-30T12:00:00Z, '3 days ago'",
    )
    _add_paths(parser, "only these paths")
    _add_json(parser)


def _restore(args: argparse.Namespace) -> int:
    wanted = parse_checkpoint(args.checkpoint, now=datetime.now().astimezone())
    record, paths = _mounted_paths(args)
    result = ControlClient(record.socket_path).request(
        "restore",
        timeout_s=None,
        on_progress=Progress("Restoring"),
        snapshot=wanted,
        paths=paths,
    )
    if result.get("sealed") is None:
        lines = ["Nothing differs; no checkpoint was made."]
    else:
        done = f"{show.count(result.get('restored'), 'file')} restored, {result.get('removed')} "
        lines = [f"{done}removed, as the new checkpoint {result['sealed']}."]
    if result.get("recovery"):
        lines.append(f"What was replaced is in {result['recovery']}.")
    _print_result(args, result, lines)
    return _exit_code(result)


def _describe_log(parser: Parser) -> None:
    _add_mountpoint(parser)
    parser.add_argument("--follow", action="store_true", help="go on as things happen")
    parser.add_argument(
        "--limit",
        metavar="N",
        type=_count,
        default=LOG_ROWS_DEFAULT,
        help=f"the newest N rows (default: {LOG_ROWS_DEFAULT})",
    )
    _add_json(parser)


def _log(args: argparse.Namespace) -> int:
    record, _ = _mounted_paths(args)
    client = ControlClient(record.socket_path)
    since: int | None = None
    while True:
        result = client.request("log", timeout_s=ANSWER_TIMEOUT_S, since=since, limit=args.limit)
        for row in result["rows"]:
            if args.json:
                _print_json(row)
            else:
                print(show.log_row(row))
        if not args.follow:
            return 0
        sys.stdout.flush()
        rows = result["rows"]
        # Not `last`: more rows than the limit may have come since the last question.
        since = rows[-1]["id"] if rows else (since or result.get("last"))
        time.sleep(FOLLOW_S)


# -- fetch, evict ------------------------------------------------------------------------------


def _describe_fetch(parser: Parser) -> None:
    _add_mountpoint(parser)
    _add_paths(parser, "bring these")
    parser.add_argument("--all", action="store_true", help="bring everything")
    _add_json(parser)


def _fetch(args: argparse.Namespace) -> int:
    record, paths = _mounted_paths(args)
    if bool(paths) == args.all:
        raise UsageError("Name either paths or --all.")
    result = ControlClient(record.socket_path).request(
        "fetch",
        timeout_s=None,
        on_progress=Progress("Fetching"),
        paths=paths,
        all=args.all,
    )
    done = f"{show.count(result.get('files'), 'file')}, {show.size(result.get('bytes'))}"
    _print_result(args, result, [f"Fetched {done}."])
    return 0


def _describe_evict(parser: Parser) -> None:
    _add_mountpoint(parser)
    _add_paths(parser, "only these (default: everything)")
    _add_json(parser)


def _evict(args: argparse.Namespace) -> int:
    record, paths = _mounted_paths(args)
    result = ControlClient(record.socket_path).request("evict", timeout_s=None, paths=paths)
    done = f"{show.size(result.get('bytes'))} of {show.count(result.get('files'), 'file')}"
    _print_result(args, result, [f"Freed {done}."])
    return 0


# -- fsck, doctor ------------------------------------------------------------------------------


def _describe_fsck(parser: Parser) -> None:
    parser.add_argument("target", metavar="URI|MOUNTPOINT|STATE-DIR")
    parser.add_argument("--read-data", action="store_true", help="read and verify every object")
    parser.add_argument("--repair", action="store_true", help="mend what can be mended")
    _add_json(parser)


def _fsck(args: argparse.Namespace) -> int:
    from hpkfs import fsck

    record = find_mount(args.target)
    target = args.target
    if record is not None and mountpoint.mount_around(mountpoint.resolve(target)) is not None:
        target = record.state_dir
    found = fsck.check(target, read_data=args.read_data, repair=args.repair)
    lines = [show.fsck_finding(finding) for finding in found] or ["Nothing is wrong."]
    _print_result(args, {"findings": found}, lines)
    return EXIT_FINDINGS if found else 0


def _doctor(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from hpkfs import doctor

    found = doctor.examine()
    ok = all(finding.ok for finding in found)
    result = {"ok": ok, "findings": [asdict(finding) for finding in found]}
    last = "This machine can mount." if ok else "This machine cannot mount yet."
    _print_result(args, result, [*show.findings(found), last])
    return 0 if ok else EXIT_USAGE


# -- what several commands share ---------------------------------------------------------------


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _add_state_dir(parser: Parser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="keep this machine's state there")


def _add_mountpoint(parser: Parser) -> None:
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="or a path inside it")


def _add_target(parser: Parser) -> None:
    parser.add_argument("target", metavar="MOUNTPOINT|URI", help="a mount, or a store")


def _add_paths(parser: Parser, text: str) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="*", help=text)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _mounted_paths(args: argparse.Namespace) -> tuple[MountRecord, list[str]]:
    """Return the mount that is meant, and the paths in it; the path that named it may be one."""
    record = find_mount(args.mountpoint)
    if record is None:
        there = mountpoint.mount_around(mountpoint.resolve(args.mountpoint))
        if there is not None:
            raise TransientError(
                f"The mount on {there.path} has no daemon that answers you.",
                kept="What was written is safe on the machine that it runs on.",
                next_step="Mount the agent again; a dead mount is cleared by that.",
            )
        raise UsageError(
            f"No agent is mounted on {args.mountpoint}.",
            next_step="`hpkfs list` shows what is mounted.",
        )
    paths = [_relative(record, path) for path in getattr(args, "paths", [])]
    inside = record.inside(mountpoint.resolve(args.mountpoint))
    if inside and not paths:
        paths = [inside]
    return record, paths


def _relative(record: MountRecord, path: str) -> str:
    """Make a path relative to the mount; a relative one is taken from a current folder inside it.

    Elsewhere a relative path starts at the mountpoint.
    """
    if not os.path.isabs(path) and record.inside(mountpoint.resolve(".")) is None:
        path = os.path.join(record.mountpoint, path)
    inside = record.inside(mountpoint.resolve(path))
    if inside is None:
        raise UsageError(f"{path} is not in the mount on {record.mountpoint}.")
    return inside


def _unmounted(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return address and named state directory of an agent without a daemon."""
    store, _ = places.resolve_uri(args.target)
    return str(store), _absolute(args.state_dir)


def _exit_code(result: dict[str, Any]) -> int:
    code = result.get("exit_code")
    if isinstance(code, int):
        return code
    return EXIT_CODES.get(str(result.get("state")), 0)


def _describe(error: HpkfsError) -> dict[str, object]:
    from hpkfs.background import describe

    return describe(error)


def _print_result(args: argparse.Namespace, result: dict[str, Any], lines: Iterable[str]) -> None:
    if args.json:
        _print_json(result)
        return
    for line in lines:
        print(line)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


class Progress:
    """Shows on stderr how far work is: on a terminal one line, elsewhere a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._shown = time.monotonic()

    def __call__(self, told: dict[str, Any]) -> None:
        """Show a report with `bytes` and `total`, unless the last one was a moment ago."""
        now = time.monotonic()
        is_terminal = sys.stderr.isatty()
        pause_s = PROGRESS_TERMINAL_S if is_terminal else PROGRESS_LINES_S
        if now - self._begun < PROGRESS_AFTER_S or now - self._shown < pause_s:
            return
        self._shown = now
        end = "\x1b[K\r" if is_terminal else "\n"
        print(self._line(told, now - self._begun), end=end, file=sys.stderr, flush=True)

    def _line(self, told: dict[str, Any], spent_s: float) -> str:
        done, total = told.get("bytes"), told.get("total")
        line = f"{self._what}: {show.size(done)}"
        if isinstance(total, int) and isinstance(done, int) and 0 < done <= total:
            left_s = spent_s * (total - done) / done
            line += f" of {show.size(total)}, about {left_s:.0f} s left"
        for name in ("objects", "files"):
            if name in told:
                line += f", {told[name]} {name}"
        return line


@dataclass(frozen=True, slots=True)
class Command:
    """A command: a line for the overview, its text, its arguments, and what it does."""

    summary: str
    text: str
    describe: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Final = {
    "init": Command(
        "make a new store, empty or from an existing home",
        "Make a new agent in a folder that has none. With --from-home what travels of an existing\n"
        "Hermes home goes into the store, and everything else is copied to this machine's own\n"
        "part; the source is only read.",
        _describe_init,
        _init,
    ),
    "adopt": Command(
        "turn an existing agent home into a mount; can be undone",
        "Turn an existing Hermes home into a mount in the same place. The old folder is kept as\n"
        "DIR.before-hpkfs, and the command that undoes all this is printed.",
        _describe_adopt,
        _adopt,
    ),
    "mount": Command(
        "show the agent as a directory",
        "Show an agent as a directory. The command returns when the mount is ready, and prints\n"
        "the line that starts Hermes on it.",
        _describe_mount,
        _mount,
    ),
    "umount": Command(
        "save and unmount",
        "Unmount an agent, then save what has changed and send it to the store, for up to 15 s.\n"
        "Ends with 2 when something still waits on this machine.",
        _describe_umount,
        _umount,
    ),
    "list": Command(
        "mounts and known agents on this machine",
        "Show what is mounted, and which agents this machine knows.",
        _add_json,
        _list,
    ),
    "status": Command(
        "what is saved, what waits, what stays on this machine and why",
        "Show what is saved where, what waits, and what stays on this machine and why. The exit\n"
        "code says the same: 0 clean, 2 something waits, 3 conflict, 4 authorisation needed,\n"
        "5 quota, 6 damaged.",
        _describe_status,
        _status,
    ),
    "sync": Command(
        "save now, and take over what another machine saved",
        "Save what has changed as a checkpoint, send it to the store, and take over what another\n"
        "machine has saved. Without changes no checkpoint is made.",
        _describe_sync,
        _sync,
    ),
    "history": Command(
        "the checkpoints, newest first",
        "Show the checkpoints, newest first. They can be looked at in MOUNTPOINT/.hpkfs/history.",
        _describe_history,
        _history,
    ),
    "restore": Command(
        "bring an earlier state back, as a new checkpoint",
        "Bring an earlier state back, whole or by path. It becomes a new checkpoint, so that it\n"
        "can be undone in the same way. A date means the end of that day.",
        _describe_restore,
        _restore,
    ),
    "fetch": Command(
        "bring bytes to this disk now, for working offline",
        "Bring the bytes of files to this disk now, for working offline.",
        _describe_fetch,
        _fetch,
    ),
    "evict": Command(
        "free this disk of bytes that are safe on the store",
        "Free this disk of bytes that are on the store. What is changed and not yet sent,\n"
        "and what is open, stays.",
        _describe_evict,
        _evict,
    ),
    "log": Command(
        "what changed, when, and in which checkpoint it was saved",
        "Show what changed, when, and in which checkpoint it was saved; oldest first.",
        _describe_log,
        _log,
    ),
    "fsck": Command(
        "check a store or this machine's copy, and mend what can be mended",
        "Check a store or this machine's copy of it. Each finding is a line: what, where, and\n"
        "whether --repair can mend it. The only copy of something is never deleted. Ends with 6\n"
        "when something was found.",
        _describe_fsck,
        _fsck,
    ),
    "doctor": Command(
        "can this machine mount? each finding with its remedy",
        "Check whether this machine can mount, and say for each finding what to do.",
        _add_json,
        _doctor,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
