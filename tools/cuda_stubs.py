# SPDX-License-Identifier: Apache-2.0
"""Lets a CUDA build of PyTorch run on the CPU alone, without the CUDA libraries that it links.

    python cuda_stubs.py FOLDER        the folder torch/lib of an installed PyTorch; gcc and binutils

PyPI's wheels for Linux are CUDA builds: gigabytes of nvidia-* packages, for code that a test on the CPU never
runs. Each library that PyTorch's own libraries need and that is nowhere to be found is made here, with a
function for every symbol that they want of it. The function returns 100, which is cudaErrorNoDevice: PyTorch
then finds no device, and `torch.cuda.is_available()` is False. Nothing is made in place of a library that is
there.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_SYMBOL = re.compile(r"^\s*\d+: .* (?:GLOBAL|WEAK)\s+\S+\s+(\S+) (\S+)")
_VERSION_FILE = re.compile(r"Version: \d+\s+File: (\S+)")
_VERSION_NAME = re.compile(r"Name: (\S+)\s+Flags")
_OWN_PREFIX = re.compile(r"^(cu|nv|nccl|__cuda)")  # no other library's unversioned symbols begin so


def _read(flag: str, library: Path) -> list[str]:
    """What readelf says about a library."""
    command = ["readelf", "--wide", flag, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _found(name: str) -> bool:
    """Whether the system's loader finds a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing_libraries(libraries: list[Path]) -> list[str]:
    """Sonames that libraries need, and that are neither among them nor on the system."""
    have = {library.name for library in libraries}
    needed = {
        match[1]
        for library in libraries
        for line in _read("--dynamic", library)
        if (match := _NEEDED.search(line))
    }
    return sorted(name for name in needed - have if not _found(name))


def version_owners(libraries: list[Path]) -> dict[str, str]:
    """The library that each version name of a symbol is asked of. CUDA's carry the library's name, mostly."""
    owners: dict[str, str] = {}
    for library in libraries:
        soname = None
        for line in _read("--version-info", library):
            if match := _VERSION_FILE.search(line):
                soname = match[1]
            elif soname and (match := _VERSION_NAME.search(line)):
                owners[match[1]] = soname
    return owners


def wanted_symbols(libraries: list[Path]) -> dict[str, set[str]]:
    """Symbols that libraries leave to others: of each version name, or of "" for those without one."""
    wanted: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    for library in libraries:
        for line in _read("--dyn-syms", library):
            if match := _SYMBOL.match(line):
                name, _, version = match[2].partition("@")
                if match[1] != "UND":
                    defined.add(name)
                elif version or _OWN_PREFIX.match(name):
                    wanted[version.strip("@").split(" ")[0]].add(name)
    wanted[""] -= defined
    return wanted


def make(folder: Path, soname: str, versions: dict[str, set[str]]) -> None:
    """Writes one library.

    Args:
        folder: where it goes.
        soname: its name.
        versions: the symbols of each version name.
    """
    symbols = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "stubs.c", Path(scratch) / "stubs.map"
        source.write_text("".join(f"long {symbol}(void) {{ return 100; }}\n" for symbol in symbols))
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
                for version, names in versions.items()
                if version
            )
        )
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-O1", f"-Wl,-soname,{soname}"]
        command += [f"-Wl,--version-script={script}"] if any(versions) else []
        subprocess.run([*command, "-o", str(folder / soname), str(source)], check=True)


def main() -> None:
    """Makes what is missing."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    libraries = sorted(folder.glob("*.so*"))
    wanted = wanted_symbols(libraries)
    missing, owners = missing_libraries(libraries), version_owners(libraries)
    for soname in missing:
        versions = {version: names for version, names in wanted.items() if owners.get(version) == soname}
        # Symbols without a version are found in any library: they go into the first.
        make(folder, soname, versions | ({"": wanted[""]} if soname == missing[0] else {}))
        print(f"made {soname}")


if __name__ == "__main__":
    main()
