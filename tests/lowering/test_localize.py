"""One device's kernel: which parameters it takes, what shrinks, what is left as it was."""

import pytest
import tilelang.language as T
import torch
from tvm import ir

import mesh_tensor as mt
from kernels.matmul import batched_matmul, split_k_matmul
from kernels.matmul import matmul as any_matmul
from mesh_tensor.lowering.pipeline import lower_kernel

from .kernels import matmul, scale
from .support import assert_right, coordinates, local_kernels, lowered, only_kernel, outline, text


@pytest.mark.parametrize(
    ("mesh", "layouts", "sizes"),
    [
        ({"x": 2}, {"A": {"x": 0}, "C": {"x": 0}}, (32, 48, 32)),
        ({"x": 2}, {"B": {"x": 1}, "C": {"x": 1}}, (64, 24, 32)),
        ({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}, (64, 48, 16)),
        ({"x": 2, "y": 3}, {"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 1}}, (32, 16, 32)),
        ({"x": 2, "y": 2}, {"A": {"x": 0, "y": 0}, "C": {"x": 0, "y": 0}}, (16, 48, 32)),
        ({"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}, (32, 48, 16)),
    ],
    ids=str,
)
def test_a_matmul_is_the_matmul_of_its_tiles(mesh, layouts, sizes):
    kernel = local_kernels(lowered(matmul(64, 48, 32), mesh, layouts))[0]
    ir.assert_structural_equal(kernel, matmul(*sizes))


@pytest.mark.parametrize("trans_A", [False, True])
@pytest.mark.parametrize("trans_B", [False, True])
def test_transposed_operands(trans_A, trans_B):
    flags = {"trans_A": trans_A, "trans_B": trans_B}
    layouts = {"A": {"x": int(trans_A), "y": int(not trans_A)}, "B": {"y": int(trans_B)}, "C": {"x": 0}}
    kernel = local_kernels(lowered(any_matmul(64, 48, 32, 16, 16, 8, **flags), {"x": 2, "y": 2}, layouts))[0]
    ir.assert_structural_equal(kernel, any_matmul(32, 48, 16, 16, 16, 8, **flags))


def test_batches():
    layouts = {name: {"x": 0} for name in "ABC"}
    kernel = only_kernel(lowered(batched_matmul(6, 32, 32, 32, 16, 16, 16), {"x": 3}, layouts))
    ir.assert_structural_equal(kernel, batched_matmul(2, 32, 32, 32, 16, 16, 16))


def test_loops_keep_what_the_author_said_of_them():
    (kernel,) = local_kernels(lowered(matmul(64, 48, 64), {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}}))
    assert 'annotations={"num_stages": 2}' in text(kernel)
    assert '"tl.launch_threads": [128, 1, 1]' in text(kernel)


def test_the_name_is_the_kernels_own():
    (kernel,) = local_kernels(lowered(scale(32, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert kernel.attrs["global_symbol"] == "scale"
    assert set(kernel.attrs.keys()) == {"global_symbol"}, "nothing of the annotations is left"


def test_the_kernel_that_was_given_is_not_changed():
    func = mt.annotate(matmul(64, 48, 32), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}})
    before = text(func.without_attr("mesh_tensor_info"))
    mt.lower(func)
    assert text(func.without_attr("mesh_tensor_info")) == before


def symbolic(rows, block=8):
    """B = 2 * A with a symbolic number of rows."""

    @T.prim_func
    def kernel(A: T.Tensor((rows, 16), "float32"), B: T.Tensor((rows, 16), "float32")):
        with T.Kernel(T.ceildiv(rows, block), threads=32) as bx:
            a = T.alloc_shared((block, 16), "float32")
            T.copy(A[bx * block, 0], a)
            for i, j in T.Parallel(block, 16):
                a[i, j] = a[i, j] * 2.0
            T.copy(a, B[bx * block, 0])

    return kernel


def test_symbolic_sizes_that_no_tile_tells_become_parameters():
    kernel = only_kernel(lowered(symbolic(T.dynamic("rows")), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert coordinates(kernel) == ["rows"]
    assert "A_handle, ((rows + 1) // 2, 16)" in text(kernel)


def test_symbolic_sizes_that_stay_are_told_by_the_tiles():
    kernel = only_kernel(lowered(symbolic(T.dynamic("rows")), {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}}))
    assert coordinates(kernel) == []
    assert "A_handle, (rows, 8)" in text(kernel)


def test_scalars_come_before_coordinates():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32"), n: T.int32):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = T.if_then_else(bx * 8 + i < n, A[bx * 8 + i], 0.0)

    local = only_kernel(lowered(kernel, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}))
    assert coordinates(local) == ["n", "x"]
    assert "bx * 8 + (i + x * 16) < n" in text(local)


def test_split_k_with_atomics():
    func = split_k_matmul(32, 32, 64, 2, 16, 16, 16)
    layouts = {"A": {"x": 1}, "B": {"x": 0}}
    result = lowered(func, {"x": 2}, layouts)
    assert outline(result)[0] == "to_partial(C, sum, x)", "what C holds counts once"
    inputs = [torch.randn(32, 64), torch.randn(64, 32), torch.randn(32, 32)]
    expected = inputs[2].double() + inputs[0].double() @ inputs[1].double()
    assert_right(func, {"x": 2}, layouts, inputs, lambda a, b, c: expected)


def test_work_on_padding_that_could_stop_the_program_is_skipped():
    """An integer division by what is loaded, and an index that is loaded."""

    @T.prim_func
    def kernel(
        A: T.Tensor((13,), "int32"),
        ids: T.Tensor((13,), "int32"),
        t: T.Tensor((5,), "int32"),
        B: T.Tensor((13,), "int32"),
    ):
        with T.Kernel(13, threads=8) as bx:
            B[bx] = 100 // A[bx] + t[ids[bx]]

    layouts = dict.fromkeys(("A", "ids", "B"), {"x": 0})
    local = only_kernel(lowered(kernel, {"x": 3}, layouts))
    assert "if bx < T.max(T.min(13 - x * 5, 5), 0):" in text(local)
    inputs = [
        torch.randint(1, 9, (13,), dtype=torch.int32),
        torch.randint(0, 5, (13,), dtype=torch.int32),
        torch.randint(0, 9, (5,), dtype=torch.int32),
    ]
    assert_right(kernel, {"x": 3}, layouts, inputs, lambda a, i, t: 100 // a + t[i.long()])


@pytest.mark.parametrize("devices", [2, 64])
def test_the_local_kernel_does_not_grow_with_the_mesh(devices):
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    annotated = mt.annotate(any_matmul(4096, 64, 4096, 16, 16, 16), {"x": devices, "y": devices}, layouts)
    kernel = local_kernels(lower_kernel(annotated))[0]
    ir.assert_structural_equal(kernel, any_matmul(4096 // devices, 64, 4096 // devices, 16, 16, 16))
