"""What the flags of the compiler are for."""

import ctypes
import platform
import re
import subprocess

import tilelang.language as T
import torch

from mesh_tensor.targets.cpu import build as cpu_build
from mesh_tensor.targets.cpu import build as cpu_compiler

SIZES = range(1, 101)


def small_blocks(size):
    """Blocks that fit into the 128 bytes below the stack that a function may use unasked, and some that do not. What
    is read at places that data say has to be in memory, and not in registers."""

    @T.prim_func
    def kernel(X: T.Tensor((size,)), at: T.Tensor((size,), "int32"), Y: T.Tensor((size,))):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared((size,), "float32")
            wide = T.alloc_local((size,), "float64")
            T.copy(X, x)
            for i in T.serial(size):
                wide[i] = T.cast(x[i], "float64") * 3.0
            for i in T.serial(size):
                x[i] = T.cast(wide[i] - T.cast(x[i], "float64"), "float32")
            for i in T.serial(size):
                Y[i] = x[at[i]]

    return kernel


def test_small_blocks_of_every_size(tmp_path):
    """All in one file, which is quicker. g++ 12 stores some with aligned instructions at odd addresses."""
    start = "#ifdef __cplusplus\nextern"
    sources = {size: cpu_build.c_source(small_blocks(size)) for size in SIZES}
    parts = [sources[1].split(start)[0]]
    for size, source in sources.items():
        code = source[source.index(start) :]
        assert re.search(rf"float x\[{size}\]|float x;", code)
        parts.append(re.sub(r"mesh_tensor_(body|kernel)\b", rf"mesh_tensor_\1_{size}", code))
    (tmp_path / "kernels.cpp").write_text("\n".join(parts))
    cpu_compiler.compile_library(tmp_path / "kernels.cpp", tmp_path / "kernels.so")
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    for size in SIZES:
        x, at, y = torch.randn(size), torch.randperm(size).int(), torch.full((size,), torch.nan)
        run = library[f"{cpu_build.ENTRY}_{size}"]
        run.argtypes = [ctypes.c_void_p] * 3
        assert run(x.data_ptr(), at.data_ptr(), y.data_ptr()) == 0
        torch.testing.assert_close(y, 2 * x[at.long()], rtol=1e-6, atol=0)


def test_there_is_no_red_zone_where_there_could_be_one(tmp_path):
    """Nothing lies below the stack's end: without the flag, blocks would."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    assert ("-mno-red-zone" in cpu_compiler.FLAGS) == is_x86
    (tmp_path / "kernel.cpp").write_text(cpu_build.c_source(small_blocks(8)))
    for flags, expected in ((cpu_compiler.FLAGS, False), (set(cpu_compiler.FLAGS) - {"-mno-red-zone"}, True)):
        command = ["g++", *flags, "-S", str(tmp_path / "kernel.cpp"), "-o", "-"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not is_x86 or bool(re.search(r"-\d+\(%rsp\)", code)) == expected


def test_clang_gets_no_flag_of_gcc_alone(tmp_path, monkeypatch):
    """A compiler that says it is clang, and refuses what clang does not know."""
    clang = tmp_path / "clang++"
    clang.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *--version*) echo clang version 14.0.6; exit;;\n"
        "  *-fvect-cost-model*|*-distribute-patterns*) echo unknown argument; exit 1;;\n"
        "esac\n"
        'exec g++ "$@"\n'
    )
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    (tmp_path / "kernel.cpp").write_text(cpu_build.c_source(small_blocks(8)))
    cpu_compiler.compile_library(tmp_path / "kernel.cpp", tmp_path / "kernel.so")
    assert ctypes.CDLL(str(tmp_path / "kernel.so"))[cpu_build.ENTRY]
