"""A Dagster project as a user makes one, in an environment of its own that has our wheel and borrows everything else from this one."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAME = "analytics_of_ours"
_QUIET = {"DAGSTER_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": "", "COLUMNS": "200"}
_COMMANDS = """
import sys
from click.testing import CliRunner
from create_dagster.cli import cli as create
from dagster_dg_cli.cli import cli as dg
for line in sys.stdin.read().splitlines():
    program, *arguments = line.split()
    done = CliRunner().invoke({"create-dagster": create, "dg": dg}[program], arguments)
    print(done.output)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    print(f"exit code {done.exit_code}")
"""


@dataclass(frozen=True)
class OwnProject:
    """The project in `folder`, its environment's `python`, and the variables that its processes get."""

    folder: Path
    python: Path
    environment: Mapping[str, str]

    @property
    def defs(self) -> Path:
        return self.folder / "src" / NAME / "defs"

    def run(self, *lines: str) -> str:
        """Run commands of `dg` and `create-dagster` in one process, which saves loading them each time; return what they say."""
        where = self.folder if self.folder.exists() else self.folder.parent
        done = self._python(["-c", _COMMANDS], where, "\n".join(lines))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def program(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._python(arguments, self.folder)

    def _python(self, arguments: Sequence[str], where: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *arguments],
            input=given,
            cwd=where,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def own_project(folder: Path, wheel: Path, variables: Mapping[str, str]) -> OwnProject:
    """Make an environment in `folder`, with the wheel in it, and a project. Nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # What installing the project would do, and then the packages of this environment, of which the wheel's own hide the editable ones.
    (packages / "a.pth").write_text(str(folder / NAME / "src"))
    (packages / "b.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PGWAL_SOURCE", "PGWAL_LAKE"))}
    made = OwnProject(folder / NAME, python, {**environment, **_QUIET, "VIRTUAL_ENV": str(folder / "env"), **variables})
    said = made.run(f"create-dagster project {NAME} --no-uv-sync")
    assert "exit code 0" in said, said
    return made


def built_wheel(folder: Path) -> Path:
    """Build our wheel."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
