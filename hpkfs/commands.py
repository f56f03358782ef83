"""The commands that look at an agent, save it, or change what is where.

Each asks the daemon, or does without one. `cli.py` calls them with the parsed arguments; each
returns the exit code. What only one of them needs is imported inside it, since start-up time
counts.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from hpkfs import mountpoint, places, show
from hpkfs.arguments import parse_checkpoint
from hpkfs.client import ControlClient, MountRecord, all_mounts, find_dead_mount, find_mount
from hpkfs.errors import TransientError, UsageError
from hpkfs.options import EXIT_CODES
from hpkfs.terminal import Progress, print_json, print_result, say

if TYPE_CHECKING:
    import argparse

EXIT_USAGE: Final = 1
ANSWER_TIMEOUT_S: Final = 30.0
WATCH_S: Final = 2.0
FOLLOW_S: Final = 1.0


def list_mounts(args: argparse.Namespace) -> int:
    """Show mounts and known agents."""
    records = all_mounts()
    mounted = {os.path.realpath(record.state_dir) for record in records if not record.read_only}
    agents: list[dict[str, object]] = [
        {"uri": uri, "state_dir": path, "mounted": path in mounted}
        for path in places.known_state_dirs()
        if (uri := places.noted_store(path)) is not None  # else its only mount has failed
    ]
    result = {"mounts": [_record_fields(record) for record in records], "agents": agents}
    print_result(result, show.mounts(records, agents), as_json=args.json)
    return 0


def _record_fields(record: MountRecord) -> dict[str, object]:
    names = ("uri", "mountpoint", "state_dir", "pid", "read_only", "started_at")
    return {name: getattr(record, name) for name in names}


def status(args: argparse.Namespace) -> int:
    """Show how an agent is, once or again and again."""
    if args.target is None:
        records = all_mounts()
        if len(records) != 1:
            return list_mounts(args)
        args.target = records[0].mountpoint
    while True:
        result, lines = _ask_status(args)
        if args.watch and sys.stdout.isatty() and not args.json:
            sys.stdout.write("\x1b[H\x1b[2J")
        print_result(result, lines, as_json=args.json)
        if not args.watch:
            return exit_code(result)
        sys.stdout.flush()
        time.sleep(WATCH_S)


def _ask_status(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    record = _meant(args)
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


def sync(args: argparse.Namespace) -> int:
    """Save, send and take over."""
    record = _meant(args)
    if record is None:
        from hpkfs import offline

        uri, state_dir = _unmounted(args)
        result = offline.sync(uri, state_dir, wait=args.wait)
    else:
        result = ControlClient(record.socket_path).request(
            "sync", timeout_s=None, on_progress=Progress("Sending"), wait=args.wait, prefer=None
        )
    lines = [f"Checkpoint {result['sealed']}."] if result.get("sealed") else []
    if record is not None and record.read_only:
        lines = ["A read-only mount has nothing to save, and shows the checkpoint it was made for."]
    else:
        lines.append(show.outcome(result))
    print_result(result, lines, as_json=args.json)
    return exit_code(result)


def history(args: argparse.Namespace) -> int:
    """Show the checkpoints."""
    record = _meant(args)
    if record is None:
        from hpkfs import offline

        uri, state_dir = _unmounted(args)
        result = offline.history(uri, state_dir, limit=args.limit)
    else:
        result = ControlClient(record.socket_path).request(
            "history", timeout_s=None, limit=args.limit
        )
    print_result(result, show.history(result), as_json=args.json)
    return 0


def restore(args: argparse.Namespace) -> int:
    """Bring an earlier state back."""
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
    print_result(result, lines, as_json=args.json)
    return exit_code(result)


def log(args: argparse.Namespace) -> int:
    """Show the operation log."""
    record, _ = _mounted_paths(args)
    client = ControlClient(record.socket_path)
    since: int | None = None
    while True:
        result = client.request("log", timeout_s=ANSWER_TIMEOUT_S, since=since, limit=args.limit)
        for row in result["rows"]:
            if args.json:
                print_json(row)
            else:
                say(show.log_row(row))
        if not args.follow:
            return 0
        sys.stdout.flush()
        rows = result["rows"]
        # Not `last`: more rows than the limit may have come since the last question.
        since = rows[-1]["id"] if rows else (since or result.get("last"))
        time.sleep(FOLLOW_S)


def fetch(args: argparse.Namespace) -> int:
    """Bring bytes to this disk."""
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
    print_result(result, [f"Fetched {done}."], as_json=args.json)
    return 0


def evict(args: argparse.Namespace) -> int:
    """Free this disk of clean bytes."""
    record, paths = _mounted_paths(args)
    result = ControlClient(record.socket_path).request("evict", timeout_s=None, paths=paths)
    done = f"{show.size(result.get('bytes'))} of {show.count(result.get('files'), 'file')}"
    print_result(result, [f"Freed {done}."], as_json=args.json)
    return 0


def login(args: argparse.Namespace) -> int:
    """Authorise this machine."""
    from hpkfs import login as logins

    return logins.login(args)


def logout(args: argparse.Namespace) -> int:
    """Revoke this machine's authorisation."""
    from hpkfs import login as logins

    return logins.logout(args)


def fsck(args: argparse.Namespace) -> int:
    """Check a store or a state directory."""
    from hpkfs import fsck as checker

    found = checker.check(args.target, read_data=args.read_data, repair=args.repair)
    lines = [show.fsck_finding(finding) for finding in found] or ["Nothing is wrong."]
    print_result({"findings": found}, lines, as_json=args.json)
    return checker.exit_code(found)


def doctor(args: argparse.Namespace) -> int:
    """Check this machine."""
    from dataclasses import asdict

    from hpkfs import doctor as checker

    found = checker.examine()
    ok = all(finding.ok for finding in found)
    result = {"ok": ok, "findings": [asdict(finding) for finding in found]}
    last = "This machine can mount." if ok else "This machine cannot mount yet."
    print_result(result, [*show.findings(found), last], as_json=args.json)
    return 0 if ok else EXIT_USAGE


def _meant(args: argparse.Namespace) -> MountRecord | None:
    """Return the mount that is meant; with --state-dir only one that has its state there."""
    if args.state_dir is None:
        return find_mount(args.target)
    wanted = os.path.realpath(args.state_dir)
    named = find_mount(args.target)
    records = [*([named] if named is not None else []), *all_mounts()]
    return next((r for r in records if os.path.realpath(r.state_dir) == wanted), None)


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
        raise not_mounted(args.mountpoint)
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
    text, state_dir = args.target, args.state_dir
    if not places.has_scheme(text):
        dead = find_dead_mount(text)
        state_dir = state_dir or (dead.state_dir if dead else None)
        path = mountpoint.resolve(text)
        there = mountpoint.mount_around(path)
        # A dead mount and the bare directory below one both tell whose they are.
        text = (there.source if there is not None else mountpoint.bare_uri(path)) or text
    store, _ = places.resolve_uri(text)
    return str(store), absolute(state_dir)


def absolute(path: str | None) -> str | None:
    """Make a path that a person typed absolute."""
    return None if path is None else os.path.abspath(path)


def exit_code(result: dict[str, Any]) -> int:
    """Return the exit code that a result means."""
    code = result.get("exit_code")
    if isinstance(code, int):
        return code
    return EXIT_CODES.get(str(result.get("state")), 0)


def not_mounted(path: str) -> UsageError:
    """Return the error that nothing is mounted on a path."""
    next_step = "`hpkfs list` shows what is mounted."
    uri = mountpoint.bare_uri(mountpoint.resolve(path))
    if uri is not None:
        next_step = f"Mount it again with `hpkfs mount {shlex.quote(uri)} {shlex.quote(path)}`."
    return UsageError(f"No agent is mounted on {path}.", next_step=next_step)
