"""Results as people read them: lines of text from the dicts that `--json` prints.

`cli.py` is the only caller and does the printing. Names of files are shown so that a strange one
cannot change the terminal.
"""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpkfs.client import MountRecord
    from hpkfs.doctor import Finding
    from hpkfs.errors import HpkfsError

PATHS_SHOWN_MAX: Final = 20
ID_DIGITS: Final = 12
UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def clean(text: object) -> str:
    """Escape what does not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def size(number: object) -> str:
    """Show a number of bytes."""
    if not isinstance(number, int | float):
        return "?"
    value, unit = float(number), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def count(number: object, one: str, many: str | None = None) -> str:
    """Show how many there are of something."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def failure(error: HpkfsError) -> str:
    """Show what happened, what was kept, what to do next."""
    return clean(error)


def start_line(mountpoint: str) -> str:
    """Return the command that starts Hermes on a mount."""
    home, workspace = shlex.quote(mountpoint), shlex.quote(f"{mountpoint.rstrip('/')}/workspace")
    return f"HERMES_HOME={home} TERMINAL_CWD={workspace} hermes"


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Align rows in columns."""
    texts = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)] if texts else []
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]


def some(paths: Sequence[object], *, indent: str = "  ") -> list[str]:
    """Show the first paths of a list, and how many more there are."""
    lines = [f"{indent}{clean(path)}" for path in paths[:PATHS_SHOWN_MAX]]
    if len(paths) > PATHS_SHOWN_MAX:
        lines.append(f"{indent}and {len(paths) - PATHS_SHOWN_MAX} more")
    return lines


def kept_local(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Show what stays on this machine, and why."""
    return some([f"{entry.get('path')}: {entry.get('reason')}" for entry in entries])


def status(result: Mapping[str, Any]) -> list[str]:
    """Show the state of an agent on this machine."""
    where = result.get("mountpoint") or "not mounted"
    lines = [f"{clean(where)}  {clean(result.get('uri', ''))}"]
    detail = result.get("detail")
    lines.append(f"State:   {result.get('state')}" + (f", {clean(detail)}" if detail else ""))
    for label, key in (("Head", "head"), ("Base", "base")):
        point = result.get(key)
        if point and not (key == "base" and point == result.get("head")):
            shown = str(point.get("snapshot_id"))
            if point.get("created_at"):
                shown += f" of {point['created_at']}"
            lines.append(f"{label}:    {clean(shown)}")
    lines += _amounts(result)
    dirty = result.get("dirty") or []
    if dirty:
        lines += ["Changed, not yet sealed:", *some(dirty)]
    kept = result.get("kept_local") or []
    if kept:
        lines += ["Stays on this machine:", *kept_local(kept)]
    new = result.get("new_local") or []
    if new:
        lines.append(f"New here, and staying on this machine: {clean(', '.join(new))}")
    if result.get("last_error"):
        lines.append(f"Last error: {clean(result['last_error'])}")
    return lines


def _amounts(result: Mapping[str, Any]) -> list[str]:
    lines = []
    files, held = result.get("files"), result.get("bytes")
    if files and held:
        line = f"Files:   {files.get('total')}, {size(held.get('total'))}"
        if files.get("absent"):
            line += f"; {files['absent']} not whole on this disk"
        lines.append(line)
    pending = result.get("pending") or {}
    if isinstance(pending, dict) and pending.get("checkpoints"):
        waiting = count(pending["checkpoints"], "checkpoint")
        lines.append(f"Waiting: {waiting}, {size(pending.get('bytes'))}")
    return lines


def path_states(result: Mapping[str, Any]) -> list[str]:
    """Show the byte states of single paths."""
    rows = [
        (entry.get("state"), size(entry.get("size")), entry.get("sha256") or "-", entry.get("path"))
        for entry in result.get("paths", [])
    ]
    return table(rows)


def what_travels(result: Mapping[str, Any]) -> list[str]:
    """Show every path that goes into a checkpoint, and what stays."""
    lines = [
        f"{clean(entry.get('path'))}  {size(entry.get('size'))}"
        for entry in result.get("files", [])
    ]
    lines += [f"{clean(link)}  link" for link in result.get("links", [])]
    kept = result.get("kept_local", [])
    if kept:
        lines.append("Stays on this machine:")
        lines += [f"  {clean(entry['path'])}: {clean(entry['reason'])}" for entry in kept]
    return lines


def outcome(result: Mapping[str, Any]) -> str:
    """Show in a sentence how `sync` or `umount` ended."""
    state, detail = result.get("state"), result.get("detail")
    pending = result.get("pending")
    if state in {"clean", None}:
        sentence = "Everything is on the store"
    elif isinstance(pending, int) and pending:
        waiting = f"{count(pending, 'checkpoint')} {'waits' if pending == 1 else 'wait'}"
        sentence = f"{waiting} on this machine, not yet on the store ({state})"
    else:
        sentence = f"The state is {state}"
    return f"{sentence}: {clean(detail)}" if detail else f"{sentence}."


def history(result: Mapping[str, Any]) -> list[str]:
    """Show checkpoints, newest first."""
    rows = [
        (
            row.get("created_at"),
            row.get("snapshot_id"),
            row.get("state"),
            count(row.get("files"), "file"),
            size(row.get("bytes")),
        )
        for row in result.get("checkpoints", [])
    ]
    lines = table(rows)
    unread = result.get("unread")
    if unread:
        lines.append(f"{unread} older ones are not read yet.")
    elif unread is None:
        lines.append("There may be older ones.")
    return lines or ["There is no checkpoint yet."]


def log_row(row: Mapping[str, Any]) -> str:
    """Show a row of the operation log."""
    parts = [_row_time(row), row.get("op"), row.get("path")]
    parts += [row.get("detail"), _short(row.get("checkpoint"))]
    return "  ".join(clean(part) for part in parts if part)


def _row_time(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("time_ns"), int):
        return datetime.fromtimestamp(row["time_ns"] // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(row.get("time", ""))


def _short(checkpoint: object) -> str:
    return f"in {str(checkpoint)[:ID_DIGITS]}" if checkpoint else ""


def mounts(records: Iterable[MountRecord], agents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Show the mounts, then the agents that are known and not mounted."""
    rows = [(r.mountpoint, r.uri, "read-only" if r.read_only else "read-write") for r in records]
    rows += [("-", a["uri"], "not mounted") for a in agents if not a["mounted"]]
    return table(rows) or ["Nothing is mounted, and no agent is known on this machine."]


def made(result: Mapping[str, Any]) -> list[str]:
    """Show what `init` or `adopt` made."""
    lines = [f"Made the agent {clean(result.get('agent_id'))} in {clean(result.get('uri'))}."]
    lines.append(
        f"In the first checkpoint, {clean(result.get('snapshot_id'))}: "
        f"{count(result.get('files'), 'file')}."
    )
    lines += some(list(result.get("travels") or []))
    if result.get("local_files"):
        where = clean(result.get("state_dir"))
        lines.append(f"{count(result['local_files'], 'file')} stay on this machine, in {where}.")
    if result.get("local_names"):
        names = clean(", ".join(result["local_names"]))
        lines.append(f"Bound to a machine, secret or not known, so not on the store: {names}")
    if result.get("kept_local"):
        lines += [
            "Among what travels, these stay on this machine:",
            *kept_local(result["kept_local"]),
        ]
    if result.get("skipped"):
        lines += ["Not taken over:", *kept_local(result["skipped"])]
    if result.get("detail"):
        lines.append(clean(result["detail"]))
    return lines


def fsck_finding(finding: Mapping[str, Any]) -> str:
    """Show a finding of fsck in a line: what, where, and whether it can be mended."""
    mend = "mended" if finding.get("repaired") else "cannot be mended"
    if not finding.get("repaired") and finding.get("repairable"):
        mend = "--repair can mend it"
    if finding.get("notice"):
        mend = "no damage"
    return f"{clean(finding.get('what'))}: {clean(finding.get('where'))} ({mend})"


def findings(found: Iterable[Finding]) -> list[str]:
    """Show the findings of doctor, each with its remedy."""
    lines = []
    for finding in found:
        mark = "ok     " if finding.ok else "PROBLEM"
        lines.append(f"{mark}  {finding.name}: {finding.detail}")
        if finding.remedy:
            lines.append(f"         {finding.remedy}")
    return lines
