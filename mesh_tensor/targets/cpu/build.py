"""C source of a kernel, and the shared library that the C++ compiler makes from it, kept on disk between runs."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tilelang
import tvm_ffi
from tilelang.contrib.cc import get_cplus_compiler
from tvm import ir, tirx
from tvm.target import Target

from mesh_tensor.base.dtypes import ALIGNMENT, element_dtype, is_float, itemsize
from mesh_tensor.base.errors import refuse

from .blas import blas_wanted, give_blas
from .cache import add_library, build_once, find_library
from .dtypes import compute_dtype, storage_dtype
from .legalize import CKernel, legalize_for_c
from .reduce import LANES
from .retarget import retarget_for_cpu

ENTRY = "mesh_tensor_kernel"
_BODY = "mesh_tensor_body"
_BLAS_GEMM = "mt_gemm_float32_float32_float32"
_HEADERS = {
    part: Path(__file__).parent / "csrc" / f"mesh_tensor_{part}.h" for part in ("cpu", "math", "fold", "gemm", "report")
}
_C_TYPES = {"float32": "float", "float64": "double", "bool": "uint8_t"}


def c_source(func: tirx.PrimFunc) -> str:
    """The C++ source of `func` for a CPU: `int mesh_tensor_kernel(pointers and scalars...)`, 0 if it ran, 1 if there
    was no memory for its blocks."""
    kernel = legalize_for_c(retarget_for_cpu(func), _BODY)
    generate = tvm_ffi.get_global_func("target.build.tilelang_c")
    try:
        text = generate(ir.IRModule({_BODY: kernel.func}), Target("c")).inspect_source()
    except Exception as error:
        refuse(
            "TileLang's C code generator rejects a kernel",
            where=f"kernel '{func.attrs['global_symbol']}', target 'c'",
            why=str(error).strip().splitlines()[-1],
            fix='report it as a bug of mesh_tensor; target="interpret" runs the kernel without a compiler',
        )
    text = text.replace("#include <tl_templates/cpp/common.h>", _prelude(kernel))
    # Blocks never overlap anything else; TileLang's generator has no word for that.
    text = re.sub(r"\* (mt_block\d+_\w+)(?=[,)])", r"* __restrict__ \1", text)
    return text + _entry(kernel)


def libraries_for(funcs: Sequence[tirx.PrimFunc]) -> list[ctypes.CDLL]:
    """The compiled libraries of kernels, from the cache on disk if they are there (and TileLang's cache is not
    disabled). Those that aren't are compiled at the same time, by as many compilers as there are processors."""
    found = [_sought(func) for func in funcs]
    builds = [build for build in found if not isinstance(build, ctypes.CDLL)]
    if len(builds) > 1:
        with ThreadPoolExecutor(min(len(builds), os.cpu_count() or 1)) as pool:
            built = iter(list(pool.map(lambda build: build(), builds)))
    else:
        built = (build() for build in builds)
    libraries = [each if isinstance(each, ctypes.CDLL) else next(built) for each in found]
    for library in libraries:
        give_blas(library)
    return libraries


def _sought(func: tirx.PrimFunc) -> ctypes.CDLL | Callable[[], ctypes.CDLL]:
    """The kernel's library, or what compiles it: its source is there already, as TVM is for one thread."""
    func = tirx.PrimFunc(func.params, func.body, func.ret_type, func.buffer_map).with_attr(
        {"global_symbol": func.attrs["global_symbol"]}
    )
    if not tilelang.env.is_cache_enabled():
        return partial(build_once, c_source(func), compile_library)
    kernel, compiler = kernel_key(func), compiler_stamp()
    library = find_library(kernel, compiler)
    return partial(add_library, kernel, compiler, c_source(func), compile_library) if library is None else library


def kernel_key(func: tirx.PrimFunc) -> str:
    """A name made from all that the library of `func` depends on, but the compiler."""
    parts = [_build_stamp(), "blas" if blas_wanted() else "own", func.script(show_meta=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _prelude(kernel: CKernel) -> str:
    """What the generated code is built on: the headers, and a function for each combination of dtypes in a gemm."""
    parts = ["cpu", "math", "fold", *(["gemm"] if kernel.gemms else []), *(["report"] if kernel.reports else [])]
    lines = [f"#define MT_TOTALS {LANES}", *(_HEADERS[part].read_text() for part in parts)]
    if _BLAS_GEMM in kernel.gemms and blas_wanted():
        lines.insert(0, "#define MT_BLAS")
    if kernel.reports:
        texts = ", ".join(f'"{code}"' for code in kernel.reports)
        lines.append(f"const char *const mt_reports[] = {{{texts}}};")
    for name in kernel.gemms:
        a, b, c = gemm_dtypes(name)
        types = [*(_c_type(d) for d in (a, b, c, compute_dtype(c))), *(_c_type(storage_dtype(d)) for d in (a, b, c))]
        lines.append(f"MT_GEMM({name}, {', '.join(types)})")
    return "\n".join(lines)


def gemm_dtypes(function: str) -> tuple[str, ...]:
    """The dtypes in the name of a gemm, some of which have an underscore of their own."""
    return tuple(re.findall(r"b?float8_e\dm\d(?:fn)?|[a-z]+\d+|bool", function.removeprefix("mt_gemm_")))


def _entry(kernel: CKernel) -> str:
    """The function that Python calls: it finds memory for the kernel's blocks."""
    params, names = [], []
    for index, var in enumerate([*kernel.params, *kernel.sizes]):
        is_scalar = var.dtype != "handle"
        params.append(f"{_c_type(var.dtype)} p{index}" if is_scalar else f"void* p{index}")
        names.append(f"p{index}" if is_scalar else f"({_pointer(kernel, index)})p{index}")
    offset, casts = 0, []
    for workspace in kernel.workspaces:
        c_type = _c_type(workspace.dtype)
        offset += _STAGGER
        casts.append(f"({c_type}*)(memory + {offset})")
        offset += -(-workspace.size * itemsize(workspace.dtype) // ALIGNMENT) * ALIGNMENT
    call = f"{_BODY}({', '.join(names + casts)});"
    if casts:
        call = (
            f"char* memory = (char*)aligned_alloc({ALIGNMENT}, {offset});\n  if (!memory) return 1;\n  {call}\n"
            "  free(memory);"
        )
    signature = f'extern "C" __attribute__((visibility("default"))) int {ENTRY}({", ".join(params)})'
    return f"{signature} {{\n  {call}\n  return 0;\n}}\n"


def _pointer(kernel: CKernel, index: int) -> str:
    return f"{_c_type(kernel.func.params[index].type_annotation.element_type.dtype)}*"


def _c_type(dtype: str) -> str:
    return _C_TYPES.get(dtype, f"mt_{element_dtype(dtype)}" if is_float(dtype) else f"{dtype}_t")


@functools.cache
def _build_stamp() -> str:
    """Everything but the kernel and the compiler that its library depends on."""
    package = Path(__file__).parents[2]
    passes = (path for part in ("base", "tir", "targets/cpu") for path in sorted((package / part).glob("*.py")))
    sources = [*passes, *_HEADERS.values()]
    return "\0".join([tilelang.__version__, processor(), *FLAGS, *_GCC_FLAGS, *(s.read_text() for s in sources)])


@functools.cache
def processor() -> str:
    """What tells this processor's code from that of others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") + platform.machine()


_X86 = platform.machine().lower() in ("x86_64", "amd64")
# g++ 12 stores small blocks on the stack with aligned instructions where the red zone is not aligned.
NO_RED_ZONE = ("-mno-red-zone",) if _X86 else ()
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
    *("-O2", "-march=native", "-ftree-vectorize"),
    # Integers wrap; blocks may be viewed with another dtype.
    *("-fwrapv", "-fno-strict-aliasing"),
    # IEEE results, NaN and infinity included: only what nothing can observe is given up.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *NO_RED_ZONE,
    # Compilers that prefer half of a vector do so for programs that compute little.
    *(("-mprefer-vector-width=512",) if _X86 else ()),
)
_GCC_FLAGS = (
    "-fvect-cost-model=dynamic",
    # A condition on the row leaves the loop over columns, which is then one vector operation.
    "-funswitch-loops",
    # A row of a block is copied in place: it is too short for a call of memmove.
    "-fno-tree-loop-distribute-patterns",
)
# Tensors of whole pages begin at the same place of one, and loads wait for stores to another page's same place: blocks
# begin elsewhere. A few lines of a cache; a multiple of ALIGNMENT.
_STAGGER = 320
_INSTALL = "install g++ (apt install g++, dnf install gcc-c++, conda install gxx) or clang++"
_INTERPRET = 'target="interpret" runs kernels without a compiler'
_FIRST_ERRORS = 5


def compiler_stamp() -> str:
    """What tells the compiler's output from that of another one, or with other flags, or on another processor; "" if
    there is no compiler."""
    command = _command()
    version = _version(tuple(command)) if command else ""
    return "\0".join([version, processor(), *_flags(version)]) if version else ""


def compile_library(source: Path, library: Path) -> None:
    """Make a shared library of C++ source.

    Raises:
        MeshTensorError: there is no compiler, or it rejects the source.
        OSError: there is no space for its files.
    """
    command = _command()
    if not command:
        refuse("no C++ compiler was found", fix=f"{_INSTALL}, or set CXX to the path of one; {_INTERPRET}")
    command = [*command, *_flags(_version(tuple(command))), str(source), "-o", str(library)]
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


def _flags(version: str) -> tuple[str, ...]:
    return FLAGS if "clang" in version else (*FLAGS, *_GCC_FLAGS)


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
    try:
        handle, kept = tempfile.mkstemp(prefix="mesh_tensor-", suffix=".cpp")
        os.close(handle)
        shutil.copyfile(source, kept)
    except OSError:
        return source
    return Path(kept)
