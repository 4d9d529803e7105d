"""An embedded server's account and what it may reach: root runs none itself, and no mode and no owner is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sqla_durable import embedded
from sqla_durable.embedded import EmbeddedError, start
from tests import support_embedded
from tests.support_embedded import ROOT, answers, made, postmaster_pid

pwd = pytest.importorskip("pwd", reason="accounts of POSIX")

base = support_embedded.base


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_root_runs_the_server_as_an_existing_account_and_is_told_of_one_that_is_missing(base: Path) -> None:
    with start(base / "a", user="nobody") as server:
        uid = Path(f"/proc/{postmaster_pid(server.data_dir)}").stat().st_uid
        assert uid == pwd.getpwnam("nobody").pw_uid
    with start(base / "a") as server:  # the account that made the cluster, not the one that is tried first
        assert (server.data_dir / "pgdata").stat().st_uid == uid
    for user in ("no-such-account", "root"):
        with pytest.raises(EmbeddedError, match=f"{user} cannot run it"):
            start(base / "b", user=user)
    assert not (base / "b").exists()


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_a_parent_folder_closed_to_the_servers_account_is_named_and_left_closed(base: Path) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match=f"may not pass through {closed}: .*chmod o\\+x {closed}"):
        start(closed / "data")
    assert list(closed.iterdir()) == []
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_binaries_closed_to_the_servers_account_are_copied_from_the_wheel_and_refused_from_elsewhere(
    base: Path,
) -> None:
    package = embedded.find_binaries().parents[1]
    closed = base / "closed"
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, closed / source.name)
    closed.chmod(0o700)
    bin_dir = closed / package.name / "pginstall" / "bin"
    with start(made(base / "a"), bin_dir=bin_dir) as server:
        assert answers(server.create_database("a"))
    assert closed.stat().st_mode & 0o777 == 0o700
    (closed / package.name).rename(closed / "other")
    with pytest.raises(EmbeddedError, match=f"may not pass through {closed} to .*bin_dir="):
        start(base / "b", bin_dir=closed / "other" / "pginstall" / "bin")


def test_no_mode_no_owner_and_no_account_changes_outside_of_the_folder(base: Path) -> None:
    outer, beside = base / "outer", base / "outer" / "beside"
    outer.mkdir(mode=0o751)
    beside.write_text("")
    beside.chmod(0o640)
    bin_dir = embedded.find_binaries()
    watched = [beside, outer, *outer.parents, bin_dir, *bin_dir.parents, *bin_dir.iterdir()]

    def seen() -> list[object]:
        stats = [path.stat() for path in watched]
        return [(stat.st_mode, stat.st_uid, stat.st_gid) for stat in stats] + [pwd.getpwall()]

    before = seen()
    with start(outer / "data"):
        assert seen() == before
    assert seen() == before
    assert sorted(path.name for path in outer.iterdir()) == ["beside", "data"]
