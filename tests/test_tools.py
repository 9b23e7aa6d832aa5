"""The scripts of `tools/` that `make` sets up with, where a mistake would show as something else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNPACK = Path(__file__).parents[1] / "tools" / "unpack-debian"

pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg-deb")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def package(folder: Path, *, broken: bool) -> Path:
    """Laid out as Debian's redis-server: an init script of the program's name, and the program a link to another."""
    content = folder / "content"
    script(content / "etc/init.d/served", "exit 0")
    script(content / "usr/bin/check-served", "exit 1" if broken else 'echo "served 1.0, as $0"')
    (content / "usr/bin/served").symlink_to("check-served")
    (content / "DEBIAN").mkdir()
    fields = {"Package": "served", "Version": "1", "Architecture": "all", "Maintainer": "nobody", "Description": "none"}
    (content / "DEBIAN/control").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    subprocess.run(["dpkg-deb", "--build", content, folder / "served.deb"], check=True, capture_output=True)
    return folder / "served.deb"


@pytest.mark.parametrize("broken", [False, True])
def test_of_debians_package_the_program_is_taken_and_not_its_init_script(tmp_path: Path, broken: bool) -> None:
    deb = package(tmp_path, broken=broken)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    # stands for a registry of Debian's: knows one package
    apt = f'case " $* " in *" --simulate "*) echo "Inst served (1)";; *" download "*) cp {deb} .;; esac'
    script(tmp_path / "path/apt-get", apt)
    path = os.pathsep.join([str(tmp_path / "path"), os.environ["PATH"]])

    command = ["sh", UNPACK, venv, "mine", "served", "tests on it", "served"]
    subprocess.run(command, check=True, env=os.environ | {"PATH": path}, stdout=sys.stderr)

    why = (venv / "no-mine").read_text()
    if broken:
        assert "the served that apt-get fetched does not run here" in why
        assert not (venv / "bin/served").exists()
    else:
        assert why == ""
        answer = subprocess.run([venv / "bin/served"], check=True, capture_output=True, text=True).stdout
        assert answer.startswith("served 1.0, as ")
        assert answer.strip().endswith("usr/bin/served")
