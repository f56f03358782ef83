"""The house rules that a program can check: import arrows, purity, state, words."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpkfs.durable import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpkfs"
LAUNCHER = ROOT / "launcher" / "hermes_launcher"

# From top to bottom. A module imports from its own row and from the rows below it.
LAYERS = (
    {"__main__", "cli"},
    {"commands", "mounting", "importer", "copier", "fsck", "login", "offline"},
    {"arguments", "background", "show", "terminal"},
    {"mount"},
    {"daemon", "readonly"},
    {"fuse", "waiting", "control", "virtual"},
    {"agent", "restore"},
    {"sealer", "assembly", "capture", "survey", "publisher", "refresher", "history"},
    {"volume", "recovery"},
    {"content", "cut", "journal", "inodes", "objects", "reserve", "conversations"},
    {"connection"},
    {"client", "doctor", "grants", "mountpoint", "options", "places", "settings"},
    {"transport", "durable"},
    {"core"},
    {"errors", ""},
)
IMPURE = {"trio", "os", "time", "random", "logging", "pyfuse3", "secrets", "socket", "threading"}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict"}
CHANGING_METHODS = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault",
    "add", "discard", "sort", "reverse",
}  # fmt: skip
# Each pattern has a bracket in it, so that this file does not match itself.
UNWANTED = {
    "an unfinished thought": r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b",
    "a path of one machine": r"/wor[k]/(main|shared)\b|/tmp/te[a]m\b|/root/\.(cargo|pyenv|cache)\b"
    r"|/opt/whe[e]ls|/home/[a-z]+/\.cache",
    "a package registry": r"\bpy[p]i\.org|pythonhos[t]ed\.org|\bcrates\.i[o]\b|debi[a]n\.org"
    r"|npmj[s]\.(org|com)",
}
MODULES = sorted(PACKAGE.rglob("*.py"))
LAUNCHER_MODULES = sorted(LAUNCHER.rglob("*.py"))


def name_of(path: Path) -> str:
    """`hpkfs/core/ids.py` is `hpkfs.core.ids`, `hpkfs/core/__init__.py` is `hpkfs.core`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_name(module: str) -> str:
    """The name that stands in LAYERS for a module of hpkfs."""
    return ([*module.split("."), ""])[1]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, *, types_too: bool = True) -> Iterator[str]:
    """Yield the dotted names that the source imports, inside functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif types_too or not is_type_checking(child):
            yield from imports(child, types_too=types_too)


def level(module: str) -> int:
    """How far above the ground a module of hpkfs stands."""
    for height, row in enumerate(reversed(LAYERS)):
        if layer_name(module) in row:
            return height
    pytest.fail(f"{module} is in no row of LAYERS; give it one, here and in docs/design.md")


def our_imports(path: Path, *, types_too: bool = True) -> set[str]:
    """Names of our own modules that a module imports."""
    known = {name_of(other) for other in MODULES}
    found = set()
    for name in imports(tree_of(path), types_too=types_too):
        if name.split(".")[0] == "hpkfs":
            found.add(name if name in known else name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    height = level(name_of(path))
    upward = {name for name in our_imports(path) if level(name) > height}
    assert not upward, f"{name_of(path)} imports from above: {sorted(upward)}"


def test_no_module_imports_itself_in_a_circle() -> None:
    arrows = {name_of(path): our_imports(path, types_too=False) for path in MODULES}
    while leaves := {name for name, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}
    assert not arrows, f"in or above a circle: {sorted(arrows)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=name_of)
def test_core_is_pure(path: Path) -> None:
    impure = {name for name in imports(tree_of(path)) if name.split(".")[0] in IMPURE}
    assert not impure, f"{name_of(path)} imports {sorted(impure)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_adapter_knows_pyfuse3(path: Path) -> None:
    if name_of(path) in {"hpkfs.fuse", "hpkfs.mount", "hpkfs.daemon", "hpkfs.waiting"}:
        return
    roots = {name.split(".")[0] for name in imports(tree_of(path))}
    assert "pyfuse3" not in roots


def test_volume_never_names_pyfuse3() -> None:
    assert "pyfuse3" not in (PACKAGE / "volume.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", LAUNCHER_MODULES, ids=lambda path: path.stem)
def test_launcher_talks_to_hpkfs_through_its_client_only(path: Path) -> None:
    allowed = ("hpkfs.errors", "hpkfs.client")
    ours = {name for name in imports(tree_of(path)) if name.split(".")[0] == "hpkfs"}
    assert all(name.startswith(allowed) for name in ours), sorted(ours)


@pytest.mark.parametrize("path", [*MODULES, *LAUNCHER_MODULES], ids=lambda path: path.stem)
def test_modules_hold_no_state(path: Path) -> None:
    tree = tree_of(path)
    held = {name for name, value in top_level_values(tree) if is_mutable(value)}
    variables = {name for name in held if not name.isupper() and not name.startswith("__")}
    assert not variables, f"mutable and not a constant: {sorted(variables)}"
    changed = held & set(changed_names(tree))
    assert not changed, f"constants that are changed: {sorted(changed)}"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), "a global statement"


def top_level_values(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def is_mutable(value: ast.expr) -> bool:
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
    return isinstance(value, displays)


def changed_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names whose items are set or deleted, or on which a changing method is called."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                yield ast.unparse(node.value)
            case ast.Attribute(attr=name) if name in CHANGING_METHODS:
                yield ast.unparse(node.value)
            case _:
                pass


@pytest.mark.parametrize("path", [*MODULES, *LAUNCHER_MODULES], ids=lambda path: path.stem)
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = tree_of(path)
    bare = [] if ast.get_docstring(tree) else ["the module"]
    bare += undocumented(tree)
    assert not bare, f"without a docstring in {path.name}: {', '.join(bare)}"


def undocumented(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if child.name.startswith("_"):
            continue
        inherited = {ast.unparse(decorator) for decorator in child.decorator_list}
        if not ast.get_docstring(child) and not inherited & {"override", "typing.override"}:
            yield child.name
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child)


def test_each_durable_point_is_registered() -> None:
    used = {
        keyword.value.value
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "point" and isinstance(keyword.value, ast.Constant)
    }
    assert used == POINTS


def tracked_texts() -> Iterator[tuple[str, str]]:
    listing = subprocess.run(
        ("git", "-C", str(ROOT), "ls-files", "-z"), capture_output=True, check=True, timeout=60
    )
    for name in os.fsdecode(listing.stdout).split("\0"):
        path = ROOT / name
        # Cargo writes where each crate comes from into its lock files.
        if not name or name.startswith("tests/data/") or name.endswith("Cargo.lock"):
            continue
        if not path.is_file() or path.is_symlink():
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text


@pytest.mark.parametrize("what", UNWANTED)
def test_no_tracked_text_holds(what: str) -> None:
    pattern = re.compile(UNWANTED[what])
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:8]
    for command in ("./dev run", "./dev test"):
        assert any(line.startswith(command) for line in opening)


def test_readme_lists_only_commands_that_exist() -> None:
    table = re.findall(r"^\| `hpkfs (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert table
    source = (PACKAGE / "cli.py").read_text(encoding="utf-8")
    unknown = [command for command in table if f'"{command}"' not in source]
    assert not unknown


@pytest.mark.parametrize("name", ["dev", ".ci/run"])
def test_shell_scripts_are_sound(name: str) -> None:
    script = ROOT / name
    assert os.access(script, os.X_OK)
    checkers = [("sh", "-n")] + ([("shellcheck",)] if shutil.which("shellcheck") else [])
    for checker in checkers:
        done = subprocess.run(
            (*checker, str(script)), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_tests_as_people_do() -> None:
    assert "./dev test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
