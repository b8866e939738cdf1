"""Others may write to the home: a daemon does not start there, so nobody's tokens are trusted."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support_daemon import environment, served
from support_images import made_home

from forkd.errors import HostLacks
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("command", [("serve", "--bind", "none"), ("token", "create", "mine"), ("up",)])
def test_a_home_that_others_may_write_to_is_refused_by(command: tuple[str, ...], home: Home) -> None:
    home.root.chmod(0o777)
    run = [sys.executable, "-m", "forkd.cli.main", *command]
    done = subprocess.run(run, env=environment(home, "fake"), capture_output=True, text=True, timeout=60)
    assert done.returncode == HostLacks.exit_code, done.stderr
    assert f"Others may write to the home {home.root}" in done.stderr
    assert "chmod go-w" in done.stderr
    assert not home.tokens.exists() and not home.registry.exists()


def test_others_can_read_nothing_that_a_daemon_writes_to_its_home(tmp_path: Path) -> None:
    """From the first start on, and whatever the umask is."""
    with made_home(tmp_path / "home") as home:
        home.root.rmdir()
        (tmp_path / "home").mkdir(mode=0o755)  # as one that an older forkd made
        with served(home, "--bind", "none", prefix=["sh", "-c", 'umask 000; exec "$@"', "sh"]):
            secret = [path for path in home.root.iterdir() if path.name.startswith(("registry.db", "audit", "tokens"))]
            assert {path.name for path in secret} >= {"registry.db", "registry.db-wal", "registry.db-shm"}
            assert [path.name for path in secret if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
