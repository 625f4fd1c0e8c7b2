"""Wheels of Rheostat, built from a checkout or a source distribution without network."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into a folder. Return the path of the wheel."""
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that uses the libraries of this one. Return its folder of programs.

    The libraries' folder is a plain entry of the module path, so an editable installation in it has no effect.
    """
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--offline", "--no-deps"]
    subprocess.run([*uv, "--python", str(programs / "python"), str(wheel)], check=True, capture_output=True)
    (packages,) = folder.glob("lib/*/site-packages")
    libraries = [sysconfig.get_paths()["purelib"], *_plain_entries(Path(sysconfig.get_paths()["purelib"]))]
    (packages / "zz_libraries.pth").write_text("\n".join(libraries))
    return programs


def _plain_entries(packages: Path) -> list[str]:
    """Return the folders that .pth files in a folder add to the module path."""
    lines = [line.strip() for path in sorted(packages.glob("*.pth")) for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("import ", "import\t", "#"))]
