"""Common ground of the embedded server's tests: folders, clusters made once, and processes that use a server."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from sqla_durable import embedded

if sys.platform == "win32":
    pytest.skip("kills and modes of POSIX", allow_module_level=True)

ROOT = os.geteuid() == 0
TEMPORARY = tempfile.gettempdir()
MACHINE_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# A user of a server: prints the URL and the folder, and leaves in order when a line comes in.
USER = """
server = embedded.start(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
print(server.url, server.data_dir, flush=True)
sys.stdin.readline()
server.close()
"""


@pytest.fixture(params=[None, *MACHINE_BINARIES], ids=lambda path: f"machine-{path.parent.name}" if path else "wheel")
def bin_dir(request: pytest.FixtureRequest) -> Path | None:
    """Run the test with the wheel's programs and with each PostgreSQL that the machine has."""
    return request.param


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that any account may pass through; the test fails where a server outlives it."""
    folder = open_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        yield folder
        assert eventually(lambda: not processes_of(folder)), f"left running: {processes_of(folder)}"
    finally:
        for line in processes_of(folder):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.fixture
def home(base: Path) -> Path:
    """The folder of an earlier start."""
    return made(base / "kept")


@pytest.fixture
def temporary(base: Path) -> Path:
    """The folder of an earlier start that named none."""
    home = made(base / "temporary")
    (home / "temporary").touch()
    return home


def made(home: Path, bin_dir: Path | None = None) -> Path:
    """Copy the folder of an earlier start to where a test wants it: to make a cluster takes most of a first start."""
    subprocess.run(["cp", "-a", original(bin_dir), home], check=True)
    return home


@functools.cache
def original(bin_dir: Path | None) -> Path:
    folder = open_folder()
    atexit.register(shutil.rmtree, folder)
    embedded.start(folder / "kept", bin_dir=bin_dir).close()
    return folder / "kept"


def open_folder() -> Path:
    """Make a folder that any account may pass through, in memory where there is room: disks make all wait for all."""
    memory = Path("/dev/shm")
    roomy = (
        memory.is_dir()
        and shutil.disk_usage(memory).free > 2**30
        and not os.statvfs(memory).f_flag & os.ST_NOEXEC  # programs are copied there too
    )
    folder = Path(tempfile.mkdtemp(prefix="t-", dir=memory if roomy else TEMPORARY)).resolve()
    folder.chmod(0o711)
    return folder


def eventually(state: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_of(folder: Path) -> list[str]:
    lines = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in lines.splitlines() if str(folder) in line]


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True, connect_timeout=5)


def answers(url: str) -> bool:
    try:
        connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def ask(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query).fetchone()
        return row[0] if row else None


def postmaster_pid(home: Path) -> int:
    return int((home / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def python(script: str, *args: object) -> subprocess.Popen[str]:
    """Run a script with the package, loaded as its watchdog loads it: the whole library takes longer than a start."""
    library = str(Path(embedded.__file__).parents[1])
    imports = f"import sys; from pathlib import Path; sys.path.append({library!r}); import embedded\n"
    command = [sys.executable, "-c", imports + script, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def user_of(*args: object) -> tuple[subprocess.Popen[str], str, Path]:
    process = python(USER, *args)
    assert process.stdout is not None
    url, home = process.stdout.readline().split()
    return process, url, Path(home)


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)
    assert process.returncode == 0


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the user and whatever shares its process group, as a terminal or a CI runner would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
