"""Caches and state directories that another user could fill are refused, before a byte of them is read or written."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import machine
from forebay.convert import stage_beside
from forebay.coordinator.store import RunStore
from forebay.errors import UsageError
from forebay.fetch.cache import ChunkCache
from forebay.prepare import compiled
from forebay.scheduler.journal import lock_state
from forebay.storage.store import BucketStore, FolderStore
from support.token_slices import write_tokens

STRANGER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives a directory to another user")


USES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cache": ("cache", lambda path: ChunkCache(path / "cache", 1 << 20)),
    "its map": ("cache/chunks", lambda path: ChunkCache(path / "cache", 1 << 20)),
    "FOREBAY_CACHE": ("user", lambda path: machine.user_cache()),
    "home": (f"home-{os.getuid()}", lambda path: machine.home_directory()),
    "scheduler": ("state", lambda path: lock_state(path / "state")),
    "coordinator": ("run", lambda path: RunStore(path / "run")),
    "prepare, mirror": ("out/.work", lambda path: FolderStore(str(path / "out")).directory(".work")),
    "scratch of a bucket": (f"forebay-{os.getuid()}", lambda path: BucketStore("s3://b/x").directory("")),
    "conversion": (".out.converting", lambda path: stage_beside(path / "out").__enter__()),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(machine.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "user"))
    return tmp_path


@as_root
@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize("what", ["directory", "link", "file in it"])
def test_a_directory_of_another_user(folder, monkeypatch, how, what):
    name, use = USES[how]
    monkeypatch.setattr(machine.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if what == "link":
        (folder / "target").mkdir()
        path.symlink_to(folder / "target")
    else:
        path.mkdir()
    if what == "file in it":
        path.chmod(0o777)
        (path / "f").touch()
    os.chown(path / "f" if what == "file in it" else path, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UsageError, match=rf"only this user can change, got mode .*, and other users \[{STRANGER}\]"):
        use(folder)
    assert not (folder / "target").exists() or not any((folder / "target").iterdir())


@as_root
def test_compiled_code_of_another_user_is_not_run(folder, monkeypatch):
    parent = folder / "numba"
    parent.mkdir(mode=0o755)
    os.chown(parent, STRANGER, STRANGER)  # Whoever owns it can replace what is in it.
    monkeypatch.setattr(compiled, "_parents", lambda: iter([parent, folder / "own"]))
    assert compiled.kernel_directory.__wrapped__().startswith(str(folder / "own"))


def test_an_own_directory_is_private_or_is_made_so(folder, caplog):
    assert (machine.own_directory(folder / "new" / "d").stat().st_mode & 0o777) == 0o700
    old = folder / "old"
    old.mkdir()
    old.chmod(0o775)  # As `mkdir` makes it with umask 002.
    (old / "f").touch()
    assert machine.own_directory(old).stat().st_mode & 0o777 == 0o755
    assert "had mode 775. Others may not write to it any more" in caplog.text
    for mode in (0o1777, 0o2770):  # For all, and for a group: each of them makes its own below it.
        old.chmod(mode)
        with pytest.raises(UsageError, match=f"got mode {mode:o}.*Set its option to {old}/forebay-{os.getuid()}, "):
            machine.own_directory(old)
        assert old.stat().st_mode & 0o7777 == mode


@as_root
@pytest.mark.parametrize("name", ["user", "user/verified"])
def test_a_local_dataset_is_read_without_a_cache_of_another_user(folder, caplog, name):
    data = write_tokens(folder / "data", [1000]).path
    path = folder / name
    path.mkdir(parents=True)
    os.chown(path, STRANGER, STRANGER)
    machine._warn_once.cache_clear()
    for _ in range(2):
        with forebay.Loader(data, seq_len=16, batch_size=4) as loader:
            assert next(iter(loader))
    assert caplog.text.count("is not read or written") == 1 and not any(path.iterdir())


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users can enter, unlike the others of tests."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path).resolve()


@pytest.mark.parametrize("by_link", [False, True])
def test_a_directory_that_others_can_rename(public, monkeypatch, by_link):
    (shared := public / "shared").mkdir()
    path = shared / "link" / "cache"
    (shared / "link").symlink_to(public) if by_link else (shared / "link").mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=rf"can move, got one below {shared} \(mode 777\). Set its"):
        machine.own_directory(path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UsageError, match="can move"):
        machine.own_directory(path)
    monkeypatch.setattr(Path, "is_mount", lambda self: self == shared)  # The volume of a pod.
    assert machine.own_directory(path) == path
    monkeypatch.undo()
    for mode, above in ((0o1777, 0o755), (0o2775, 0o755), (0o777, 0o750)):  # Who cannot enter renames nothing.
        shared.chmod(mode)
        public.chmod(above)
        assert machine.own_directory(path) == path


def test_directories_that_are_made_are_closed(folder):
    before = os.umask(0)
    try:
        machine.own_directory(folder / "a" / "b")
    finally:
        os.umask(before)
    assert (folder / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["state", "locks/room"])
def test_a_link_in_a_cache_is_not_followed(folder, name):
    cache, victim = folder / "cache", folder / "victim"
    victim.write_text("mine\n")
    (cache / name).parent.mkdir(parents=True, exist_ok=True)
    (cache / name).symlink_to(victim)
    with pytest.raises(UsageError, match="symbolic link"):
        ChunkCache(cache, 1 << 20)
    assert victim.read_text() == "mine\n"


def test_a_file_system_that_maps_users_is_no_stranger(folder, monkeypatch):
    (folder / "d").mkdir(mode=0o700)
    own = os.getuid()
    monkeypatch.setattr(machine.os, "getuid", lambda: own + 1)  # Every file there is of another user than this one.
    assert machine.own_directory(folder / "d") == folder / "d"
