from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs import __version__, cli, mounting, places, show
from hpkfs.arguments import (
    Parser,
    parse_checkpoint,
    parse_listed,
    parse_moment,
    parse_seconds,
    parse_size,
)
from hpkfs.core.ids import NS_PER_SECOND, timestamp_ns
from hpkfs.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpkfs.options import MountOptions

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=timezone(timedelta(hours=2)))
ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(places, "registered", list)


def mount_options(*arguments: str) -> MountOptions:
    parser = Parser(prog="hpkfs mount", description="")
    cli.COMMANDS["mount"].describe(parser)
    return mounting.mount_options(parser.parse_intermixed_args(arguments))[0]


# -- sizes and seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("256M", 256 << 20),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("1.5K", 1_536),
        ("3 MiB", 3 << 20),
        ("1TB", 1 << 40),
        ("7B", 7),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e3", "1X", "1,5G", "٣", "99999999T", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_number_of_bytes_is_that_size(number: int) -> None:
    assert parse_size(str(number)) == number


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("0", 0), ("0.5", 0.5), ("10s", 10)])
def test_seconds_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "inf", "nan", "1h", "86401"])
def test_what_is_no_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no number of seconds"):
        parse_seconds(text)


# -- times and checkpoints


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("2026-11-30T12:00:00Z", "2026-11-30T12:00:00Z"),
        ("2026-11-30t12:00:00z", "2026-11-30T12:00:00Z"),
        ("2026-11-30T12:00:00.25+01:00", "2026-11-30T11:00:00.250000Z"),
        ("2026-11-30 12:00", "2026-11-30T10:00:00Z"),
        ("2026-11-30", "2026-11-30T21:59:59.999999Z"),
        ("3 days ago", "2026-11-28T10:00:00Z"),
        ("an hour ago", "2026-12-01T09:00:00Z"),
        ("1 minute ago", "2026-12-01T09:59:00Z"),
        ("2 weeks ago", "2026-11-17T10:00:00Z"),
        (ID, ID),
        (ID.upper(), ID),
        ("0123ab", "0123ab"),
        (f"2026-11-30T12-00-00Z-{ID}", ID),
    ],
)
def test_a_checkpoint_is_named_by_digits_or_by_a_time(text: str, result: str) -> None:
    assert parse_checkpoint(text, now=NOW) == result


@pytest.mark.parametrize(
    "text",
    ["", "0123a", "2026-13-01", "2026-11-30T25:00:00Z", "soon", "-1 days ago", ID + "0",
     "9999999 weeks ago", "20261130T120000", "days ago"],
)  # fmt: skip
def test_what_names_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no checkpoint"):
        parse_checkpoint(text, now=NOW)


@given(st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_a_time_means_the_same_to_the_daemon(moment: datetime) -> None:
    text = parse_checkpoint(moment.isoformat(), now=NOW)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    assert "T" in text
    assert timestamp_ns(text) == since // timedelta(microseconds=1) * (NS_PER_SECOND // 10**6)


@given(st.integers(0, 10_000), st.sampled_from(["second", "minute", "hour", "day", "week"]))
def test_ago_is_never_in_the_future(count: int, unit: str) -> None:
    assert parse_moment(f"{count} {unit}s ago", now=NOW) <= NOW


# -- the -o lists


def test_every_listed_option_is_read() -> None:
    listed = parse_listed(
        ["ro,allow_other,uid=1000,gid=7,umask=077,showhistory,xattr",
         "offline,lazy,cache_size=1M,seal_after=5,state_dir=/s,at=0123ab"],
        now=NOW,
    )  # fmt: skip
    assert listed.said() == {
        "read_only": True,
        "allow_other": True,
        "uid": 1000,
        "gid": 7,
        "umask": 0o077,
        "showhistory": True,
        "xattr": True,
        "offline": True,
        "lazy": True,
        "cache_size_bytes": 1 << 20,
        "seal_after_s": 5.0,
        "state_dir": "/s",
        "at": "0123ab",
    }


def test_options_of_fstab_are_ignored() -> None:
    ignored = "_netdev,noauto,x-systemd.requires=a.mount,x-systemd.automount,user,defaults,"
    assert parse_listed([ignored], now=NOW).said() == {}


def test_a_comma_in_a_value_is_written_with_a_backslash() -> None:
    assert parse_listed([r"state_dir=/a\,b,ro"], now=NOW).said() == {
        "state_dir": "/a,b",
        "read_only": True,
    }


@pytest.mark.parametrize(
    "text",
    ["nonsense", "ro=1", "uid", "uid=", "uid=-1", "uid=x", "umask=8", "umask=7777", "xattr=on",
     "cache_size=big", "user=ada", "x-systemdx"],
)  # fmt: skip
def test_a_wrong_option_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_listed([text], now=NOW)


# -- mount


def test_the_defaults_of_a_mount_are_those_of_the_page(tmp_path: Path) -> None:
    options = mount_options(str(tmp_path / "store"), str(tmp_path / "mnt"))
    assert options.uri == f"file://{tmp_path}/store"
    assert options.mountpoint == str(tmp_path / "mnt")
    assert (options.cache_size_bytes, options.seal_after_s) == (4 << 30, 30)
    assert (options.read_only, options.at, options.state_dir) == (False, None, None)


def test_arguments_win_over_the_lists(tmp_path: Path) -> None:
    options = mount_options(
        "-o", "cache_size=1M,ro", str(tmp_path), "--cache-size", "2M", str(tmp_path / "m"),
        "-o", "lazy", "--seal-after", "7", "--foreground",
    )  # fmt: skip
    assert options.cache_size_bytes == 2 << 20
    assert options.seal_after_s == 7
    assert options.read_only
    assert options.lazy
    assert options.foreground


def test_paths_become_absolute_since_the_daemon_leaves_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = mount_options("store", "m", "--state-dir", "s")
    assert options.uri == f"file://{tmp_path}/store"
    assert options.mountpoint == f"{tmp_path}/m"
    assert options.state_dir == f"{tmp_path}/s"


def test_a_checkpoint_in_the_address_is_split_off(tmp_path: Path) -> None:
    options = mount_options(f"{tmp_path}@{ID}", str(tmp_path / "m"))
    assert (options.uri, options.at) == (f"file://{tmp_path}", ID)


@pytest.mark.parametrize("inner", ["store/m", "store", "."])
def test_a_mountpoint_may_not_lie_in_the_store_nor_around_it(
    inner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["mount", str(tmp_path / "store"), str(tmp_path / inner)]) == 1
    assert "lie one in the other" in capsys.readouterr().err


# -- the program


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: hpkfs {name}" in out
    assert cli.COMMANDS[name].text.split()[0] in out


def test_the_overview_names_exactly_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    named = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert code == 0
    assert named == list(cli.COMMANDS)
    assert run(capsys)[0] == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"hpkfs {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["mount"],
        ["mount", "a"],
        ["mount", "a", "b", "c"],
        ["mount", "a", "b", "--bogus"],
        ["mount", "a", "b", "-o", "bogus"],
        ["mount", "a", "b", "--cache-size", "x"],
        ["mount", "a", "b", "--read"],
        ["mount", "http://a", "b"],
        ["history", "a", "--limit", "0"],
        ["umount", "/"],
        ["log", "/"],
        ["restore", "/", "nonsense"],
        ["login", "a"],
    ],
)
def test_a_usage_error_ends_with_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err
    assert "Traceback" not in err


def replace_run(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], int], name: str = "doctor"
) -> None:
    command = cli.COMMANDS[name]
    replaced = cli.Command(command.summary, command.text, command.describe, run)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, name: replaced})


def test_an_error_ends_with_its_code_and_its_three_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def conflict(args: object) -> int:
        raise ConflictError("It moved.", kept="All is kept.", next_step="Choose.")

    replace_run(monkeypatch, conflict)
    assert run(capsys, "doctor") == (3, "", "hpkfs: It moved. All is kept. Choose.\n")
    code, out, err = run(capsys, "doctor", "--json")
    assert code == 3
    assert json.loads(out)["error"]["class"] == "ConflictError"
    assert err


@pytest.mark.parametrize(("number", "expected"), [(28, 5), (122, 5), (13, 1), (30, 1), (5, 1)])
def test_what_the_system_refuses_is_no_traceback(
    number: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise OSError(number, "", "/some/file")

    replace_run(monkeypatch, fail)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (expected, "")
    assert err.startswith("hpkfs: /some/file: ")


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    replace_run(monkeypatch, interrupt)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (130, "")
    assert "interrupted" in err


def test_options_may_stand_between_the_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def keep(args: object) -> int:
        seen.append(args)
        return 0

    replace_run(monkeypatch, keep, "status")
    assert cli.main(["status", "/mnt", "--json", "a", "--metrics", "b"]) == 0
    assert seen[0].target == "/mnt"
    assert seen[0].paths == ["a", "b"]
    assert seen[0].json
    assert seen[0].metrics


def test_nothing_mounted_is_said_and_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    assert "Nothing is mounted" in out
    _, out, _ = run(capsys, "status", "--json")
    assert json.loads(out) == {"mounts": [], "agents": []}


def test_doctor_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    result = json.loads(out)
    assert code == (0 if result["ok"] else 1)
    assert {"name", "ok", "detail", "remedy"} == set(result["findings"][0])


# -- what people see


def test_a_strange_name_cannot_change_the_terminal() -> None:
    assert show.clean("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert show.clean("größe ✓") == "größe ✓"


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_what_is_shown_always_prints(text: str) -> None:
    assert show.clean(text).isprintable()


def test_the_line_that_starts_hermes_is_quoted() -> None:
    line = show.start_line("/home/a b")
    assert line == "HERMES_HOME='/home/a b' TERMINAL_CWD='/home/a b/workspace' hermes"


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"state": "clean", "pending": 0, "detail": ""}, "Everything is on the store."),
        (
            {"state": "pending", "pending": 1, "detail": "the store is away"},
            "1 checkpoint waits on this machine, not yet on the store (pending): the store is away",
        ),
        ({"state": "corrupt", "pending": 0, "detail": "bad"}, "The state is corrupt: bad"),
    ],
)
def test_an_outcome_is_a_sentence(result: dict[str, object], sentence: str) -> None:
    assert show.outcome(result) == sentence
