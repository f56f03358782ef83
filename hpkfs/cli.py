"""The command `hpkfs`: which commands there are, their arguments and texts, and the exit code.

What they do is in `mounting.py` and `commands.py`. A usage error ends with 1, an `HpkfsError` with
its own code and its three sentences on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hpkfs import __version__, commands, mounting, show
from hpkfs.arguments import Parser
from hpkfs.client import describe_error
from hpkfs.errors import HpkfsError, UsageError
from hpkfs.terminal import explain, print_json, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_USAGE: Final = 1
EXIT_INTERRUPTED: Final = 130
LOG_ROWS_DEFAULT: Final = 1_000


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
        return _fail(error, as_json="--json" in arguments)
    except KeyboardInterrupt:
        warn("hpkfs: interrupted.")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who reads our output has gone; nothing more can be said, nor at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE
    except OSError as error:
        return _fail(explain(error), as_json="--json" in arguments)


def _fail(error: HpkfsError, *, as_json: bool) -> int:
    if as_json:
        print_json({"error": describe_error(error)})
    warn(f"hpkfs: {show.failure(error)}")
    return error.exit_code


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


def _describe_init(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI", help="a folder, as path or file:// address")
    parser.add_argument("--from-home", metavar="DIR", help="take over this Hermes home (copied)")
    parser.add_argument("--workspace", metavar="DIR", help="take over this workspace (copied)")
    parser.add_argument("--agent-id", metavar="ID", help="the agent's id (default: default)")
    _add_state_dir(parser)
    _add_json(parser)


def _describe_adopt(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the agent's home, such as ~/.hermes")
    parser.add_argument("uri", metavar="URI", nargs="?", help="where its store shall be made")
    _add_state_dir(parser)
    _add_json(parser)


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


def _describe_umount(parser: Parser) -> None:
    _add_mountpoint(parser)
    parser.add_argument("--wait", action="store_true", help="until everything is on the store")
    parser.add_argument("--no-publish", action="store_true", help="send nothing to the store now")
    parser.add_argument("--force", action="store_true", help="detach it even while programs use it")
    _add_json(parser)


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


def _describe_sync(parser: Parser) -> None:
    _add_target(parser)
    parser.add_argument("--wait", action="store_true", help="until everything is on the store")
    _add_state_dir(parser)
    _add_json(parser)


def _describe_history(parser: Parser) -> None:
    _add_target(parser)
    parser.add_argument("--limit", metavar="N", type=_count, help="the newest N only")
    _add_state_dir(parser)
    _add_json(parser)


def _describe_restore(parser: Parser) -> None:
    _add_mountpoint(parser)
    parser.add_argument(
        "checkpoint",
        metavar="SNAPSHOT|TIME",
        help="digits of an id, or a time: 2026-11-30, 2026-11-30T12:00:00Z, '3 days ago'",
    )
    _add_paths(parser, "only these paths")
    _add_json(parser)


def _describe_login(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI", help="an agent on a homeserver, or a mount of it")
    parser.add_argument("--relay", metavar="URL", help="the relay that carries the approval")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="300", help="wait so long for it (default: 300)"
    )
    _add_state_dir(parser)
    _add_json(parser)


def _describe_logout(parser: Parser) -> None:
    parser.add_argument("uri", metavar="URI", help="an agent on a homeserver, or a mount of it")
    _add_state_dir(parser)
    _add_json(parser)


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


def _describe_fetch(parser: Parser) -> None:
    _add_mountpoint(parser)
    _add_paths(parser, "bring these")
    parser.add_argument("--all", action="store_true", help="bring everything")
    _add_json(parser)


def _describe_evict(parser: Parser) -> None:
    _add_mountpoint(parser)
    _add_paths(parser, "only these (default: everything)")
    _add_json(parser)


def _describe_fsck(parser: Parser) -> None:
    parser.add_argument("target", metavar="URI|MOUNTPOINT|STATE-DIR")
    parser.add_argument("--read-data", action="store_true", help="read and verify every object")
    parser.add_argument("--repair", action="store_true", help="mend what can be mended")
    _add_json(parser)


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
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


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
        mounting.init,
    ),
    "adopt": Command(
        "turn an existing agent home into a mount; can be undone",
        "Turn an existing Hermes home into a mount in the same place. The old folder is kept as\n"
        "DIR.before-hpkfs, and the command that undoes all this is printed.",
        _describe_adopt,
        mounting.adopt,
    ),
    "login": Command(
        "authorise this machine for an agent on a homeserver",
        "Ask the owner's app for a grant: the agent's own folder on the homeserver, nothing else.\n"
        "It is kept on this machine, for you alone. The relay is that of --relay, else of\n"
        "$HPKFS_RELAY, else of `relay:` in ~/.config/hpkfs/config.yaml, else the usual one.",
        _describe_login,
        commands.login,
    ),
    "logout": Command(
        "revoke this machine's authorisation",
        "Revoke this machine's grant at the homeserver and drop it here. Files stay.",
        _describe_logout,
        commands.logout,
    ),
    "mount": Command(
        "show the agent as a directory",
        "Show an agent as a directory. The command returns when the mount is ready, and prints\n"
        "the line that starts Hermes on it.",
        _describe_mount,
        mounting.mount,
    ),
    "umount": Command(
        "save and unmount",
        "Unmount an agent, then save what has changed and send it to the store, for up to 15 s.\n"
        "Ends with 2 when something still waits on this machine.",
        _describe_umount,
        mounting.umount,
    ),
    "list": Command(
        "mounts and known agents on this machine",
        "Show what is mounted, and which agents this machine knows.",
        _add_json,
        commands.list_mounts,
    ),
    "status": Command(
        "what is saved, what waits, what stays on this machine and why",
        "Show what is saved where, what waits, and what stays on this machine and why. The exit\n"
        "code says the same: 0 clean, 2 something waits, 3 conflict, 4 authorisation needed,\n"
        "5 quota, 6 damaged.",
        _describe_status,
        commands.status,
    ),
    "sync": Command(
        "save now, and take over what another machine saved",
        "Save what has changed as a checkpoint, send it to the store, and take over what another\n"
        "machine has saved. Without changes no checkpoint is made.",
        _describe_sync,
        commands.sync,
    ),
    "history": Command(
        "the checkpoints, newest first",
        "Show the checkpoints, newest first. They can be looked at in MOUNTPOINT/.hpkfs/history.",
        _describe_history,
        commands.history,
    ),
    "restore": Command(
        "bring an earlier state back, as a new checkpoint",
        "Bring an earlier state back, whole or by path. It becomes a new checkpoint, so that it\n"
        "can be undone in the same way. A date means the end of that day.",
        _describe_restore,
        commands.restore,
    ),
    "fetch": Command(
        "bring bytes to this disk now, for working offline",
        "Bring the bytes of files to this disk now, for working offline.",
        _describe_fetch,
        commands.fetch,
    ),
    "evict": Command(
        "free this disk of bytes that are safe on the store",
        "Free this disk of bytes that are on the store. What is changed and not yet sent,\n"
        "and what is open, stays.",
        _describe_evict,
        commands.evict,
    ),
    "log": Command(
        "what changed, when, and in which checkpoint it was saved",
        "Show what changed, when, and in which checkpoint it was saved; oldest first.",
        _describe_log,
        commands.log,
    ),
    "fsck": Command(
        "check a store or this machine's copy, and mend what can be mended",
        "Check a store or this machine's copy of it. Each finding is a line: what, where, and\n"
        "whether --repair can mend it. The only copy of something is never deleted. Ends with 6\n"
        "when something was found.",
        _describe_fsck,
        commands.fsck,
    ),
    "doctor": Command(
        "can this machine mount? each finding with its remedy",
        "Check whether this machine can mount, and say for each finding what to do.",
        _add_json,
        commands.doctor,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
