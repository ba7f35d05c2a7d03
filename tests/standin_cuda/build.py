# SPDX-License-Identifier: Apache-2.0
"""Builds the stand-in libraries against the CUDA packages of a Python environment.

    python build.py VENV OUT [--toolkit FOLDER]

VENV holds a CUDA build of PyTorch with its nvidia-* packages. The headers come from the CUDA toolkit
(--toolkit, else the environment variable CUDA_HOME), because the Python packages do not carry all of them.
OUT receives libcudart, libcublas, libcublasLt and libcuda: the functions of the C files here, and for every
other symbol that the real library exports a stub that returns 0 (for libcuda, whose real library comes with
the driver, every function that cuda.h declares).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ROOT = HERE.parents[1]
_DEFINED = re.compile(r"^(?:\w[\w ]*?[ *]+)(\w+)(?:\(| [A-Z_]+_PARAMETERS$)", re.M)


def exported(library: Path) -> set[str]:
    """Functions that a library exports."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    fields = [line.split() for line in listing.stdout.splitlines()]
    return {parts[2].split("@")[0] for parts in fields if len(parts) == 3 and parts[1] in "TWi"}


def declared(header: Path) -> set[str]:
    """Functions that cuda.h declares, also under their versioned names."""
    text = header.read_text(encoding="utf-8", errors="replace")
    return set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", text)) | set(
        re.findall(r"\b(cu[A-Z]\w+_v\d)\b", text)
    )


def make(
    out: Path,
    soname: str,
    symbols: set[str],
    sources: list[str],
    include: Path,
    more: tuple[str | Path, ...] = (),
) -> None:
    """One library; `more` are arguments of the compiler."""
    name = soname.split(".")[0]
    files = [HERE / source for source in sources]
    have = {match for file in files for match in _DEFINED.findall(file.read_text())}
    stubs = sorted(symbols - have - {"_init", "_fini"})
    made, version = out / f"{name}_stubs.c", out / f"{name}.map"
    made.write_text("".join(f"int {stub}(void) {{ return 0; }}\n" for stub in stubs))
    version.write_text(f"{soname} {{ global: *; }};\n")
    command = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-w",
        "-fno-builtin",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",  # our own kernels must have the host's bits
        "-I",
        include,
        *(f"-I{folder}" for folder in (HERE, HERE.parent, ROOT / "include", ROOT / "src")),
        made,
        *files,
        *more,
    ]
    command += [
        "-o",
        out / soname,
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={version}",
        "-lpthread",
        "-lm",
    ]
    subprocess.run(command, check=True)


def main() -> None:
    """Builds all four."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("venv", type=Path)
    reader.add_argument("out", type=Path)
    reader.add_argument("--toolkit", type=Path, default=os.environ.get("CUDA_HOME"))
    options = reader.parse_args()
    if options.toolkit is None:
        reader.error("name the CUDA toolkit: --toolkit or CUDA_HOME")
    options.out.mkdir(parents=True, exist_ok=True)
    nvidia = next(options.venv.resolve().glob("lib/python3*/site-packages/nvidia/cu13"))
    include, real = Path(options.toolkit) / "include", nvidia / "lib"
    runtime = [f"cudart{part}.c" for part in ("", "_memory", "_streams")]
    runtime += ["driver.c", "streams.c", "order.c", "pins.c", "card.c"]
    make(options.out, "libcudart.so.13", exported(real / "libcudart.so.13"), runtime, include)
    make(options.out, "libcublas.so.13", exported(real / "libcublas.so.13"), ["cublas.c"], include)
    make(options.out, "libcublasLt.so.13", exported(real / "libcublasLt.so.13"), ["cublas.c"], include)
    driver = ["libcuda.c", "kernels.c", "../fake_cuda/fake_kernels.c", "../fake_cuda/fake_fingerprint.c"]
    needs = (options.out / "libcudart.so.13",)  # its card and its streams are the driver's
    make(options.out, "libcuda.so.1", declared(include / "cuda.h"), driver, include, needs)


if __name__ == "__main__":
    main()
