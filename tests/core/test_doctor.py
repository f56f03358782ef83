from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from hpkfs import doctor

if TYPE_CHECKING:
    from pathlib import Path

FULL_CAPABILITIES = "Name:\tpython\nCapEff:\t000001ffffffffff\n"
DOCKERS_DEFAULT = "Name:\tpython\nCapEff:\t00000000a80425fb\n"


def test_every_finding_that_is_not_ok_has_a_remedy() -> None:
    findings = doctor.examine()
    assert len({finding.name for finding in findings}) == len(findings) >= 7
    assert all(finding.remedy for finding in findings if not finding.ok)


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 14, 0), False)]
)
def test_python_is_supported_from_3_11_to_3_13(version: tuple[int, ...], ok: bool) -> None:
    assert doctor.check_python(version).ok is ok


def test_a_missing_library_is_named_with_the_package() -> None:
    finding = doctor.check_libfuse(("libthatnobodyhas.so.9",))
    assert not finding.ok
    assert "libfuse3" in finding.remedy


def test_a_missing_device_in_a_container_names_the_options(tmp_path: Path) -> None:
    finding = doctor.check_device(str(tmp_path / "fuse"), in_container=True)
    assert not finding.ok
    assert "--device /dev/fuse --cap-add SYS_ADMIN" in finding.remedy


def test_a_missing_device_elsewhere_names_the_module(tmp_path: Path) -> None:
    finding = doctor.check_device(str(tmp_path / "fuse"), in_container=False)
    assert not finding.ok
    assert "modprobe fuse" in finding.remedy


def test_a_device_that_may_not_be_opened_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    finding = doctor.check_device(str(tmp_path), in_container=False)
    assert not finding.ok
    assert "may not be opened" in finding.detail
    assert "chmod 0666" in finding.remedy


@pytest.mark.fuse
def test_a_device_that_opens_is_fine() -> None:
    assert doctor.check_device("/dev/fuse", in_container=False).ok


def test_another_device_in_its_place_is_no_device() -> None:
    finding = doctor.check_device("/dev/null", in_container=False)
    assert not finding.ok
    assert "is no device of FUSE" in finding.detail


def test_a_file_in_the_place_of_the_device_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "fuse").touch()
    finding = doctor.check_device(str(tmp_path / "fuse"), in_container=False)
    assert not finding.ok
    assert "is no device of FUSE" in finding.detail


def test_a_missing_helper_is_named() -> None:
    assert not doctor.check_fusermount(None, is_root=True).ok


def test_only_an_ordinary_user_needs_a_setuid_helper(tmp_path: Path) -> None:
    helper = tmp_path / "fusermount3"
    helper.touch(mode=0o755)
    assert doctor.check_fusermount(str(helper), is_root=True).ok
    finding = doctor.check_fusermount(str(helper), is_root=False)
    assert not finding.ok
    assert f"chmod u+s {helper}" in finding.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that runs as root")
def test_a_setuid_helper_is_fine_for_an_ordinary_user(tmp_path: Path) -> None:
    helper = tmp_path / "fusermount3"
    helper.touch()
    helper.chmod(0o755 | stat.S_ISUID)
    assert doctor.check_fusermount(str(helper), is_root=False).ok


def test_allow_other_is_never_a_problem_but_has_a_remedy_when_it_is_off() -> None:
    on = doctor.check_allow_other("# comment\nuser_allow_other\n")
    off = doctor.check_allow_other("#user_allow_other\n")
    assert on.ok
    assert off.ok
    assert not on.remedy
    assert "user_allow_other" in off.remedy


def test_root_without_the_capability_cannot_mount() -> None:
    assert doctor.check_capability(FULL_CAPABILITIES, in_container=True).ok
    finding = doctor.check_capability(DOCKERS_DEFAULT, in_container=True)
    assert not finding.ok
    assert "SYS_ADMIN" in finding.remedy


def test_a_container_is_known_by_its_file_or_its_variable(tmp_path: Path) -> None:
    mark = tmp_path / ".dockerenv"
    assert not doctor.is_container((str(mark),), {})
    assert doctor.is_container((str(mark),), {"container": "podman"})
    mark.touch()
    assert doctor.is_container((str(mark),), {})


def test_the_state_folder_may_be_missing_but_not_impossible(tmp_path: Path) -> None:
    assert doctor.check_state(str(tmp_path / "new" / "home")).ok
    (tmp_path / "file").touch()
    finding = doctor.check_state(str(tmp_path / "file" / "home"))
    assert not finding.ok
    assert str(tmp_path / "file") in finding.detail


def test_a_runtime_folder_of_someone_else_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpkfs.places.RUNTIME_BYTES_MAX", 1_000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "hpkfs").symlink_to("/tmp")
    finding = doctor.check_runtime()
    assert not finding.ok
    assert finding.remedy


def test_the_installed_library_and_sqlite_are_found() -> None:
    pytest.importorskip("pyfuse3")
    assert doctor.check_libfuse().ok
    assert doctor.check_sqlite().ok
