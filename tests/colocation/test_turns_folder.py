"""The folder of a group of turns is this user's own, or it is refused and nothing is touched."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from turn_takers import PATIENCE_S, give, take, takers

from sola_sched.colocation import lease as lease_module
from sola_sched.colocation.lease import Lease
from sola_sched.errors import ConfigError

#: "nobody".
SOMEBODY_ELSE = 65534
FILES = ("table", "0.alive", "0.wake")
TEXT = b"ssh-ed25519 AAAA me\n"
#: Far less than `PATIENCE_S`, and longer than anything here takes.
SOON_S = 10.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def joined(folder: Path, limit_s: float = PATIENCE_S) -> Lease:
    return Lease(str(folder), name="me", share=0.0, limit_s=limit_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that a group has used."""
    path = tmp_path / "group"
    joined(path).close()
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that is none of the group's."""
    path = tmp_path / "victim"
    path.write_bytes(TEXT)
    path.chmod(0o600)
    return path


def test_a_group_can_be_joined_again_with_what_it_has_left(folder: Path) -> None:
    joined(folder).close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_change_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)

    with pytest.raises(ConfigError, match="that nobody else may change"):
        joined(folder)


@as_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, SOMEBODY_ELSE, SOMEBODY_ELSE)

    with pytest.raises(ConfigError, match=f"got one of user {SOMEBODY_ELSE}"):
        joined(folder)


def test_a_link_to_a_folder_is_refused(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)

    with pytest.raises(ConfigError, match=r"'turns\.group'"):
        joined(link)


def _as_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _as_second_name(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def _for_all(path: Path, victim: Path) -> None:
    shutil.copyfile(victim, path)
    path.chmod(0o606)


def _of_another_user(path: Path, victim: Path) -> None:
    shutil.copyfile(victim, path)
    path.chmod(0o600)
    os.chown(path, SOMEBODY_ELSE, SOMEBODY_ELSE)


def _as_folder(path: Path, victim: Path) -> None:
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "replace",
    [
        _as_link,
        _as_second_name,
        _for_all,
        _as_folder,
        pytest.param(_of_another_user, marks=as_root),
    ],
)
def test_a_file_that_is_not_the_groups_own_is_refused(
    folder: Path, victim: Path, name: str, replace: Callable[[Path, Path], None]
) -> None:
    (folder / name).unlink()
    replace(folder / name, victim)

    with pytest.raises(ConfigError, match=r"'turns\.group'"):
        joined(folder)

    assert victim.read_bytes() == TEXT


def test_a_fifo_in_place_of_the_table_is_not_waited_for(folder: Path) -> None:
    (folder / "table").unlink()
    os.mkfifo(folder / "table", 0o600)

    with pytest.raises(ConfigError, match="must be a file of user"):
        joined(folder)


@pytest.mark.parametrize("text", [TEXT, b"\0" * 16 + TEXT, b"\0" * 1840, b"x" * 10_000])
def test_another_file_in_place_of_the_table_keeps_every_byte(folder: Path, text: bytes) -> None:
    (folder / "table").write_bytes(text)

    with pytest.raises(ConfigError, match="must be a table of turns"):
        joined(folder)

    assert (folder / "table").read_bytes() == text


def test_a_lock_that_is_never_given_back_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "_START_S", 0.05)
    with (folder / "table").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        with pytest.raises(ConfigError, match="kept the table locked for"):
            joined(folder)

    joined(folder).close()


def test_a_lock_that_is_never_given_back_holds_up_no_step_for_long(folder: Path) -> None:
    me = joined(folder, limit_s=0.05)
    with (folder / "table").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        for _ in range(3):
            take(me)
            assert me.has_turn
            give(me)

        assert me.stats.num_unlocked == 6
    take(me)
    assert me.stats.num_unlocked == 6
    me.close()


def test_a_lock_that_is_given_back_is_waited_for(folder: Path) -> None:
    me = joined(folder)
    with (folder / "table").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()

        started_s = time.monotonic()
        take(me)

    assert time.monotonic() - started_s >= 0.1
    assert not me.stats.num_unlocked
    me.close()


def test_turns_go_on_when_their_folder_is_deleted(folder: Path) -> None:
    me = joined(folder)
    with takers(str(folder), "other") as (other,):
        other.order("take")
        other.answer()
        other.order("give", None)
        other.answer()
        take(me)
        give(me)
        shutil.rmtree(folder)

        for _ in range(3):
            take(me)
            other.order("take")
            while not me.is_wanted:
                time.sleep(1e-3)
            started_s = time.monotonic()
            give(me)
            assert other.answer() - started_s < SOON_S
            other.order("give", None)
            other.answer()
    me.close()
