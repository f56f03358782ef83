"""Real programs on a mount: editors, git, SQLite, tar, cp, make, Python's venv."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.mounts import Mount, mounted, tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.fuse

PROGRAM_TIMEOUT_S = 120
GIT_FILES = 300
SAVES = 60
ROWS = 150
number = itertools.count()


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    root = tmp_path_factory.mktemp("programs")
    new = Mount(root / "store", root)
    new.run("init", new.store, "--state-dir", str(new.state))
    with mounted(new.store, root) as mount:
        yield mount


@pytest.fixture(params=["plugins", "workspace"])
def folder(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A new folder in each of the zones."""
    zone: str = request.param
    made = mount.path / zone / f"{next(number)}"
    made.mkdir(parents=True)
    return made


def run(*command: object, cwd: Path, stdin: str = "") -> str:
    """Run a program to its end; returns what it printed."""
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "TERM": "dumb"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        input=stdin,
        env={n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | quiet,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def needs(program: str) -> str:
    """The path of a program, or skip."""
    return shutil.which(program) or pytest.skip(f"{program} is missing")


# -- editors ------------------------------------------------------------------------------

VIM = (shutil.which("vim") or "vim.tiny", "-u", "NONE", "-es")
VIM_SAVE = ("-c", "%s/$//", "-c", "wq", "f")
SAVE_WITH = {
    "sed": ("sed", "-i", "s/line/line/", "f"),
    "vim by copy": (*VIM, "-c", "set backupcopy=yes", *VIM_SAVE),
    "vim by rename": (*VIM, "-c", "set backupcopy=no", *VIM_SAVE),
}

READER = """
import select, sys
whole = open(sys.argv[1], 'rb').read()
reads = 0
print('ready', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    found = open(sys.argv[1], 'rb').read()
    assert found == whole, (len(found), len(whole))
    reads += 1
print(reads)
"""


@pytest.mark.parametrize("way", ["sed", "replace"])
def test_a_reader_never_sees_a_part_while_an_editor_saves(folder: Path, way: str) -> None:
    text = "".join(f"line {number}\n" for number in range(2_000))
    (folder / "f").write_text(text)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(folder / "f")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout
        assert reader.stdout.readline() == "ready\n"
        for _ in range(SAVES if way == "replace" else SAVES // 6):
            if way == "replace":
                (folder / ".f.tmp").write_text(text)
                os.replace(folder / ".f.tmp", folder / "f")
            else:
                run(*SAVE_WITH[way], cwd=folder)
    finally:
        printed, _ = reader.communicate("stop\n", timeout=PROGRAM_TIMEOUT_S)
    assert reader.returncode == 0
    assert int(printed) > 0
    assert os.listdir(folder) == ["f"]


@pytest.mark.parametrize("way", SAVE_WITH)
def test_editors_save_and_keep_the_mode(folder: Path, way: str) -> None:
    needs(SAVE_WITH[way][0])
    (folder / "f").write_text("line\n" * 10)
    (folder / "f").chmod(0o751)
    run(*SAVE_WITH[way], cwd=folder)
    assert (folder / "f").read_text() == "line\n" * 10
    assert stat.S_IMODE((folder / "f").stat().st_mode) == 0o751
    assert os.listdir(folder) == ["f"]


def test_lock_links_that_lead_nowhere_are_kept_and_removed(folder: Path) -> None:
    (folder / ".#f").symlink_to("user@host.123:456")
    assert os.readlink(folder / ".#f") == "user@host.123:456"
    assert not (folder / ".#f").exists()
    (folder / ".#f").unlink()
    assert os.listdir(folder) == []


def test_a_home_reached_through_a_link_is_the_same(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(mount.path)
    (mount.path / "workspace" / "real.md").write_text("one")
    (mount.path / "workspace" / "link.md").symlink_to("real.md")
    run("sed", "-i", "--follow-symlinks", "s/one/two/", "home/workspace/link.md", cwd=tmp_path)
    assert (mount.path / "workspace" / "link.md").is_symlink()
    assert (tmp_path / "home" / "workspace" / "real.md").read_text() == "two"


# -- git ----------------------------------------------------------------------------------


def test_git_works_and_its_folder_stays_here(mount: Mount, tmp_path: Path) -> None:
    needs("git")
    repository = mount.path / "workspace" / "repository"
    repository.mkdir()

    def git(*arguments: object, cwd: Path = repository) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "gc.auto=0")
        return run("git", *who, *arguments, cwd=cwd)

    git("init", "-q", "-b", "main")
    for number in range(GIT_FILES):
        file = repository / f"d{number % 7}" / f"f{number}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{number}\n" * (number % 50))
    (repository / "run").write_text("#!/bin/sh\n")
    (repository / "run").chmod(0o755)
    (repository / "link").symlink_to("run")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert git("status", "--porcelain") == ""
    git("checkout", "-q", "-b", "side")
    (repository / "d1" / "f1").write_text("changed\n")
    git("stash", "-q")
    git("stash", "pop", "-q")
    git("commit", "-q", "-am", "two")
    git("gc", "-q", "--aggressive", "--prune=now")
    git("fsck", "--full", "--strict")
    git("clone", "-q", ".", mount.path / "workspace" / "clone")
    git("worktree", "add", "-q", "-b", "third", mount.path / "workspace" / "tree")
    git("checkout", "-q", "main")
    git("merge", "-q", "side")
    git("rebase", "-q", "side")
    assert git("status", "--porcelain") == ""
    for other in ("clone", "tree"):
        assert git("status", "--porcelain", cwd=mount.path / "workspace" / other) == ""
        git("fsck", cwd=mount.path / "workspace" / other)
    assert git("rev-list", "--count", "main").strip() == "2"
    expected = {
        path: digest for path, digest in tree(repository).items() if not path.startswith(".git/")
    }
    assert len(expected) == GIT_FILES + 1
    mount.run("sync", str(mount.path))
    (tmp_path / "other").mkdir()
    with mounted(mount.store, tmp_path / "other") as second:
        there = second.path / "workspace" / "repository"
        assert tree(there) == expected
        assert os.readlink(there / "link") == "run"
        assert os.access(there / "run", os.X_OK)
        assert ".git" not in os.listdir(there)


# -- SQLite -------------------------------------------------------------------------------

INSERTER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
assert db.execute(f'PRAGMA journal_mode={sys.argv[3]}').fetchone()[0] == sys.argv[3]
for n in range(int(sys.argv[4])):
    db.execute('INSERT INTO t VALUES(?, ?, ?)', (sys.argv[2], n, 'x' * 300))
db.close()
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_two_processes_write_one_sqlite_database(folder: Path, mode: str) -> None:
    path = folder / f"{mode}.db"
    db = sqlite3.connect(path)
    assert db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0] == mode
    db.execute("CREATE TABLE t(who, n, text)")
    db.commit()
    writers = [
        subprocess.Popen([sys.executable, "-c", INSERTER, path, who, mode, str(ROWS)])
        for who in "ab"
    ]
    for writer in writers:
        assert writer.wait(PROGRAM_TIMEOUT_S) == 0
    rows = db.execute("SELECT who, n FROM t ORDER BY who, n").fetchall()
    assert rows == [(who, n) for who in "ab" for n in range(ROWS)]
    db.execute("PRAGMA mmap_size=268435456")
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    assert os.listdir(folder) == [f"{mode}.db"]


# -- archives and copies ------------------------------------------------------------------


def make_tree(folder: Path) -> None:
    (folder / "a" / "deep").mkdir(parents=True)
    (folder / "a" / "empty").mkdir(mode=0o700)
    (folder / "a" / "deep" / "f").write_bytes(os.urandom(50_000))
    (folder / "a" / "run").write_text("#!/bin/sh\n")
    (folder / "a" / "run").chmod(0o750)
    (folder / "a" / "link").symlink_to("deep/f")
    (folder / "a" / "é\n").write_text("odd")
    os.link(folder / "a" / "run", folder / "a" / "hard")
    os.mkfifo(folder / "a" / "fifo")
    for number, path in enumerate(sorted((folder / "a").rglob("*"), reverse=True)):
        os.utime(path, ns=(1, 1_600_000_000_123_456_789 + number), follow_symlinks=False)


def described(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """Type and mode, size, time and target of all below a folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        target = os.readlink(path) if path.is_symlink() else ""
        size = 0 if path.is_dir() else status.st_size
        found[str(path.relative_to(folder))] = (status.st_mode, size, status.st_mtime_ns, target)
    return found


def test_tar_takes_a_tree_out_and_back(folder: Path, tmp_path: Path) -> None:
    make_tree(folder)
    run("tar", "--format=pax", "-cf", tmp_path / "t.tar", "a", cwd=folder)
    (folder / "back").mkdir()
    run("tar", "-xpf", tmp_path / "t.tar", cwd=folder / "back")
    assert described(folder / "back" / "a") == described(folder / "a")
    assert tree(folder / "back" / "a") == tree(folder / "a")
    assert (folder / "back" / "a" / "hard").stat().st_nlink == 2
    run("tar", "-df", tmp_path / "t.tar", cwd=folder)


def test_cp_copies_and_links_trees(folder: Path) -> None:
    make_tree(folder)
    run("cp", "-a", "a", "copy", cwd=folder)
    run("cp", "-al", "a", "linked", cwd=folder)
    assert described(folder / "copy") == described(folder / "linked") == described(folder / "a")
    assert tree(folder / "copy") == tree(folder / "a")
    assert (folder / "linked" / "deep" / "f").stat().st_nlink == 2
    assert (folder / "linked" / "run").stat().st_nlink == 4
    run("mv", "copy", "moved", cwd=folder)
    run("rm", "-rf", "a", "linked", "moved", cwd=folder)
    assert os.listdir(folder) == []


def test_searching_the_mount_does_not_walk_its_history(mount: Mount) -> None:
    (mount.path / "plugins").mkdir(exist_ok=True)
    (mount.path / "plugins" / "needle").write_text("once in a haystack")
    found = run("grep", "-rl", "once in a haystack", ".", cwd=mount.path).splitlines()
    assert found == ["./plugins/needle"]
    assert ".hpkfs" not in run("find", ".", cwd=mount.path)


# -- building -----------------------------------------------------------------------------

MAKEFILE = """
all: program
%.o: %.c
\tcc -c -o $@ $<
program: main.o part.o stamp
\tcc -o $@ main.o part.o
stamp: part.o
\ttouch $@
"""


def test_a_c_project_is_built_once(folder: Path) -> None:
    for program in ("make", "cc"):
        needs(program)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "main.c").write_text("int part(void); int main(void) { return part(); }\n")
    (folder / "part.c").write_text("int part(void) { return 0; }\n")
    run("make", "-s", cwd=folder)
    run("./program", cwd=folder)
    assert "Nothing to be done" in run("make", cwd=folder)


def test_a_venv_is_made_and_used(folder: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    for number in range(50):
        (packages / f"module{number}.py").write_text(f"value = {number}\n")
    code = "import sys, module7; print(module7.value, sys.prefix)"
    printed = run(folder / "venv" / "bin" / "python", "-c", code, cwd=folder)
    assert printed == f"7 {folder / 'venv'}\n"
    assert list((packages / "__pycache__").iterdir())
