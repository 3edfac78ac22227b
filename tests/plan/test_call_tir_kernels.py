"""Modules that call TileLang kernels, against torch."""

from __future__ import annotations

import pytest
import tilelang.language as T
import torch
import tvm
from tvm import relax

import mesh_tensor as mt
from kernels.convolution import convolution_2d, convolution_2d_reference
from kernels.matmul import matmul
from kernels.rms_norm import two_pass_rms_norm
from kernels.softmax import online_softmax, softmax, three_pass_softmax
from tests.lowering.tile_kernels import CASES
from tests.styles import Style

from .step_modules import call, collectives, module, operands

M, K, N = 50, 70, 36


def kernels_in_a_row():
    """rms_norm and softmax of a product, each a TileLang kernel."""
    return module(
        {"x": (M, K), "w": (K, N), "g": (N,)},
        [
            ("a", call(matmul(M, N, K, 32, 32, 32), "x", "w", shape=(M, N))),
            ("r", call(two_pass_rms_norm(M, N, block_N=32), "a", "g", shape=(M, N))),
            ("s", call(three_pass_softmax(M, N), "r", shape=(M, N))),
        ],
    )


@pytest.mark.parametrize(
    ("mesh", "shardings", "expected"),
    [
        ({"x": 2}, {"x": {"x": 0}}, []),
        ({"x": 2}, {"x": {"x": 1}, "w": {"x": 0}}, ["all_reduce"]),
        ({"x": 3}, {"x": {"x": 1}, "w": {"x": 0}, "a": {"x": 0}}, ["reduce_scatter"]),
        ({"x": 3}, {"w": {"x": 1}, "g": {"x": 0}}, ["all_reduce", "all_gather"]),
        ({"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}, "w": {"y": 0}}, ["all_reduce"]),
        ({"x": 2, "y": 2}, {"x": {"x": 0}, "w": {"y": 1}}, ["all_reduce", "all_gather"]),
    ],
    ids=str,
)
def test_kernels(mesh, shardings, expected):
    mod = kernels_in_a_row()
    data = operands(mod)
    reference = torch.softmax(torch.nn.functional.rms_norm(data[0] @ data[1], (N,), data[2], 1e-6), -1)
    made = mt.distribute_module(mod, mesh, shardings)
    torch.testing.assert_close(made(*data), reference, rtol=1e-4, atol=1e-5)
    assert collectives(made) == expected
    torch.testing.assert_close(mt.run_sequential(mod, data), reference, rtol=1e-4, atol=1e-5)


def flat_softmax(rows, columns):
    """Softmax of rows that lie one after the other in one dim."""

    @T.prim_func
    def kernel(A: T.Tensor((rows * columns,), "float32"), B: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, threads=32) as bx:
            a = T.reshape(A, (rows, columns))
            row, total = T.alloc_fragment((1, columns), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(a[bx, 0], row)
            for j in T.Parallel(columns):
                row[0, j] = T.exp(row[0, j])
            T.reduce_sum(row, total, dim=1)
            for j in T.Parallel(columns):
                T.reshape(B, (rows * columns,))[bx * columns + j] = row[0, j] / total[0]

    return kernel


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("sharding", [{"x": 0}, {"x": 3}, {"x": 1}], ids=str)
def test_a_kernel_that_views_its_operands_as_matrices(mesh, sharding):
    kernel = convolution_2d(4, 3, 6, 4, 6, block_M=8, block_N=8, block_K=16)
    mod = module(
        {"image": (4, 6, 4, 3), "weight": (3, 3, 3, 6)},
        [
            ("c", call(kernel, "image", "weight", shape=(4, 6, 4, 6))),
            ("r", lambda builder, env: relax.op.nn.relu(env["c"])),
        ],
    )
    data = operands(mod)
    expected = convolution_2d_reference(*data).relu()
    made = mt.distribute_module(mod, mesh, {"image": {"x": 0}, "r": sharding})
    torch.testing.assert_close(made(*data), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mt.run_sequential(mod, data), expected, rtol=1e-4, atol=1e-5)
    if mesh == {"x": 2} and sharding == {"x": 0}:
        assert collectives(made) == []


@pytest.mark.parametrize("shardings", [{"flat": {"x": 0}}, {"s": {"x": 0}}, {"flat": {"x": 0}, "s": {"x": 1}}], ids=str)
def test_a_kernel_that_views_one_row_as_a_matrix(shardings):
    mod = module({"flat": (15 * 8,)}, [("s", call(flat_softmax(15, 8), "flat", shape=(15, 8)))])
    (data,) = operands(mod)
    for mesh in ({"x": 2}, {"x": 3}):
        made = mt.distribute_module(mod, mesh, shardings)
        torch.testing.assert_close(made(data), data.reshape(15, 8).softmax(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mt.run_sequential(mod, [data]), data.reshape(15, 8).softmax(-1), rtol=1e-4, atol=1e-5)


def test_modules_with_kernels_are_saved_as_json(tmp_path):
    """Text of TileLang's kernels is printed, but the parser does not know all of its words."""
    mod = kernels_in_a_row()
    (tmp_path / "global.json").write_text(tvm.ir.save_json(mod))
    loaded = mt.load_module(tmp_path / "global.json")
    made = mt.distribute_module(loaded, {"x": 2}, {"x": {"x": 0}})
    data = operands(mod)
    torch.testing.assert_close(made(*data), mt.run_sequential(mod, data), rtol=1e-4, atol=1e-5)
    mt.save_module(made.local_module, tmp_path / "local.json")
    tvm.ir.assert_structural_equal(mt.load_module(tmp_path / "local.json"), made.local_module)
    (tmp_path / "local.txt").write_text(made.local_module.script(show_meta=True))
    with pytest.raises(mt.MeshTensorError, match="'.*local.txt' can't be parsed as TVMScript") as error:
        mt.load_module(tmp_path / "local.txt", trusted=True)
    assert "TileLang's kernels by mt.save_module" in str(error.value)


@pytest.mark.parametrize("kernel", [softmax, three_pass_softmax, online_softmax])
@pytest.mark.parametrize("dim", [0, 1])
def test_kernels_along_a_dim_that_they_need_whole(kernel, dim):
    mod = module({"x": (M, N)}, [("y", call(kernel(M, N), "x", shape=(M, N)))])
    data = operands(mod)
    made = mt.distribute_module(mod, {"x": 3}, {"x": {"x": dim}, "y": {"x": dim}}, target="interpret")
    torch.testing.assert_close(made(*data), torch.softmax(data[0], -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "shardings", "expected"),
    [
        ({"x": 2}, {"x": {"x": 0}}, []),
        ({"x": 2, "y": 2}, {"x": {"x": 0, "y": 0}}, []),
        ({"x": 2, "y": 2}, {"x": {"x": 0}, "w": {"y": 1}}, []),
        ({"x": 3}, {"x": {"x": 0}}, ["all_gather"]),
        ({"x": 2}, {"x": {"x": 1}}, ["all_gather"]),
    ],
    ids=str,
)
def test_kernels_on_merged_dims(mesh, shardings, expected):
    """The batch stays split where its tiles are contiguous parts of the merged dim."""
    mod = module(
        {"x": (4, 6, 8), "w": (8, 10)},
        [
            ("f", lambda bb, env: relax.op.reshape(env["x"], (24, 8))),
            ("y", call(matmul(24, 10, 8, 16, 16, 16), "f", "w", shape=(24, 10))),
            ("z", lambda bb, env: relax.op.reshape(env["y"], (4, 6, 10))),
        ],
    )
    data = operands(mod)
    made = mt.distribute_module(mod, mesh, shardings)
    torch.testing.assert_close(made(*data), data[0] @ data[1])
    assert collectives(made) == expected


def test_low_precision_products_are_reduced_in_float32():
    mod = module(
        {"x": (16, 64), "w": (64, 16)},
        [("y", call(matmul(16, 16, 64, 16, 16, 16, dtype="float16"), "x", "w", shape=(16, 16), dtype="float16"))],
        dtype="float16",
    )
    made = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "w": {"x": 0}})
    data = [tensor.half() for tensor in operands(mod)]
    torch.testing.assert_close(made(*data), (data[0].float() @ data[1].float()).half(), rtol=2e-3, atol=2e-3)
    (reduced,) = [step for step in made.program.steps if getattr(step, "kind", "") == "all_reduce"]
    assert made.program.values[reduced.src].dtype == "float32"


def test_local_kernels_are_made_once():
    steps = [
        ("a", call(matmul(8, 8, 8, 8, 8, 8), "x", "w", shape=(8, 8))),
        ("b", call(matmul(8, 8, 8, 8, 8, 8), "a", "w", shape=(8, 8))),
    ]
    made = mt.distribute_module(module({"x": (8, 8), "w": (8, 8)}, steps), {"x": 2}, {"x": {"x": 0}})
    functions = [var.name_hint for var in made.local_module.functions]
    assert sorted(functions) == ["main", "matmul_kernel_local"]
    again = tvm.ir.load_json(tvm.ir.save_json(made.local_module))
    tvm.ir.assert_structural_equal(again, made.local_module)


def test_explain_names_kernels_and_what_happens_inside_them():
    made = mt.distribute_module(kernels_in_a_row(), {"x": 3}, {"w": {"x": 1}, "g": {"x": 0}})
    text = made.explain()
    assert "kernel two_pass_rms_norm_kernel_0" in text
    assert "main.r (two_pass_rms_norm_kernel): partial values are completed" in text


@pytest.mark.parametrize("shardings", [{"x": {"x": 0}}, {}], ids=str)
def test_a_kernel_over_tiles_is_no_part_of_a_module(shardings):
    layouts = dict.fromkeys("AB", {"x": 0})
    kernel = CASES["iota"].make(M, K)(Style("forgotten", {"x": 2}, layouts))
    mod = module({"x": (M, K)}, [("a", call(kernel, "x", shape=(M, K)))])
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(mod, {"x": 2}, shardings)
    assert "asks for tiles (get_tile_shape, get_tile_offset, ...)" in str(error.value)
    assert "kernels in a module are written over whole tensors" in str(error.value)


@pytest.mark.parametrize("slabs", [2, 4])
def test_collectives_of_a_module_go_beside_its_kernels_in_slabs(slabs):
    mod = module(
        {"x": (128, 64), "w": (64, 32)}, [("a", call(matmul(128, 32, 64, 32, 32, 32), "x", "w", shape=(128, 32)))]
    )
    shardings = {"x": {"x": 1}, "w": {"x": 0}}
    data = operands(mod)
    bulk = mt.distribute_module(mod, {"x": 2}, shardings, overlap="off")
    made = mt.distribute_module(mod, {"x": 2}, shardings, overlap=slabs, poison=True, target="interpret")
    assert [step.wait for step in bulk.program.collectives] == [True]
    assert [step.wait for step in made.program.collectives] == [False] * slabs
    assert f"in {slabs} slabs of {128 // slabs} of m: overlap={slabs}" in made.explain()
    torch.testing.assert_close(made(*data), bulk(*data), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made(*data), data[0] @ data[1], rtol=1e-4, atol=1e-4)


def test_places_from_the_end():
    @T.prim_func
    def from_the_last(A: T.Tensor((12, 8), "float32"), C: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                C[bx * 4 + i, j] = A[bx * 4 + i, j] - A[-1, j]

    x = torch.randn(12, 8)
    mod = module({"x": (12, 8)}, [("y", call(from_the_last, "x", shape=(12, 8)))])
    assert torch.equal(mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}})(x), x - x[-1])
    assert torch.equal(mt.run_sequential(mod, [x]), x - x[-1])
