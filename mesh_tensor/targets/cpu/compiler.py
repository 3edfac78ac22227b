"""The C++ compiler that kernels for a CPU are built with: which one it is, and what it says."""

from __future__ import annotations

import errno
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilelang.contrib.cc import get_cplus_compiler

from mesh_tensor.base.errors import refuse

_X86 = platform.machine().lower() in ("x86_64", "amd64")
# g++ 12 stores small blocks on the stack with aligned instructions where the red zone is not aligned.
NO_RED_ZONE = ("-mno-red-zone",) if _X86 else ()
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
    *("-O2", "-march=native", "-ftree-vectorize", "-fvect-cost-model=dynamic"),
    # A condition on the row leaves the loop over columns, which is then one vector operation.
    "-funswitch-loops",
    # Integers wrap; blocks may be viewed with another dtype.
    *("-fwrapv", "-fno-strict-aliasing"),
    # IEEE results, NaN and infinity included: only what nothing can observe is given up.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *NO_RED_ZONE,
)
_INSTALL = "install g++ (apt install g++, dnf install gcc-c++, conda install gxx) or clang++"
_INTERPRET = 'target="interpret" runs kernels without a compiler'
_FIRST_ERRORS = 5


def compiler_stamp() -> str:
    """What tells the compiler's output from that of another one; "" if there is no compiler."""
    command = _command()
    return _version(tuple(command)) if command else ""


def compile_library(source: Path, library: Path) -> None:
    """Make a shared library of C++ source.

    Raises:
        MeshTensorError: there is no compiler, or it rejects the source.
        OSError: there is no space for its files.
    """
    command = _command()
    if not command:
        refuse("no C++ compiler was found", fix=f"{_INSTALL}, or set CXX to the path of one; {_INTERPRET}")
    command = [*command, *FLAGS, str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        _refuse_command(command[0], error)
    if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(library))
    if done.returncode or not library.is_file():
        kept = _kept(source)
        refuse(
            "the C++ compiler fails on the code of a kernel",
            where=f"{kept}, compiled by {shlex.join([*command[:-3], str(kept), *command[-2:]])}",
            why=_first_errors(done),
            fix=f"set CXX to another compiler if this one is broken; if it is not, report it as a bug of mesh_tensor, "
            f"with that file; {_INTERPRET}",
        )


def _command() -> list[str]:
    """The compiler, with the arguments that the environment gives it: CXX="ccache g++"."""
    found = get_cplus_compiler()
    if not found or shutil.which(found):
        return [found] if found else []
    parts = shlex.split(found)
    return parts if len(parts) > 1 else [found]


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return f"{command[1:]} {done.stdout}" if done.returncode == 0 else ""


def _refuse_command(program: str, error: OSError) -> None:
    variable = next((name for name in ("CXX", "CC") if os.environ.get(name)), None)
    refuse(
        f"there is no C++ compiler at {program!r}"
        if isinstance(error, FileNotFoundError)
        else f"{program!r} can't run",
        where=f"the environment variable {variable}" if variable else "",
        why=error.strerror or str(error),
        fix=f"unset {variable or 'CXX'} or set it to the path of a compiler; {_INSTALL}; {_INTERPRET}",
    )


def _first_errors(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    if not errors:
        return f"it ended with status {done.returncode}, and wrote no library" + (
            "" if done.returncode else " all the same"
        )
    more = [f"... and {len(errors) - _FIRST_ERRORS} more"] if len(errors) > _FIRST_ERRORS else []
    return "\n    ".join([*(line[:300] for line in errors[:_FIRST_ERRORS]), *more])


def _kept(source: Path) -> Path:
    """A copy of the source that stays."""
    try:
        handle, kept = tempfile.mkstemp(prefix="mesh_tensor-", suffix=".cpp")
        os.close(handle)
        shutil.copyfile(source, kept)
    except OSError:
        return source
    return Path(kept)
