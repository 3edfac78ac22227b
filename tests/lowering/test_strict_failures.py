"""strict=True: every buffer, dim and axis that can't lie as annotated is listed, with the reason."""

import pytest
import tilelang.language as T

import mesh_tensor as mt

from .kernels import matmul, scale
from .support import lowered


def refused(func, mesh, layouts):
    with pytest.raises(mt.MeshTensorError) as error:
        lowered(func, mesh, layouts, strict=True)
    return str(error.value)


def test_an_input_that_lies_otherwise():
    message = refused(matmul(32, 32, 32), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}})
    assert "buffer 'B' is annotated sharded on dim 0 on axis 'x', but lies replicated" in message
    assert "the axis splits factor m (it costs least)" in message
    assert "where: kernel 'matmul', strict=True" in message
    assert "fix: annotate what the rule can split, or lower without strict=True" in message


def test_an_output_that_would_be_gathered():
    message = refused(scale(32, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 1}})
    assert "buffer 'A' is annotated sharded on dim 0 on axis 'x', but lies sharded on dim 1" in message


def wandering(M, N):
    """What columns leave goes on from column to column, in no way that parts could be put together from."""

    @T.prim_func
    def wandering(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(M, threads=32) as i:
            state = T.alloc_fragment((1,), "float32")
            T.clear(state)
            for j in T.serial(N):
                state[0] = T.sin(state[0]) + X[i, j]
                Y[i, j] = state[0]

    return wandering


def test_a_dim_that_needs_replication():
    message = refused(wandering(16, 64), {"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}})
    assert message.startswith("2 problems:")
    for name in "XY":
        assert f"buffer '{name}' dim 1 on axis 'x' needs replication: " in message
    assert "the store to state keeps one of many coordinates' values" in message


def test_every_problem_is_listed():
    layouts = {"A": {"x": 1, "y": 0}, "B": {"x": 1, "y": 0}, "C": {"x": 0, "y": 1}}
    message = refused(matmul(32, 32, 32), {"x": 2, "y": 2}, layouts)
    assert message.startswith("2 problems:")
    assert "buffer 'A' is annotated sharded on dim 0 on axis 'y'" in message
    assert "buffer 'B' is annotated sharded on dim 1 on axis 'x'" in message


@pytest.mark.parametrize(
    "layouts",
    [
        {"A": {"x": 0}, "C": {"x": 0}},
        {"A": {"x": 1}, "B": {"x": 0}},
        {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}},
        {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}},
        {},
    ],
    ids=str,
)
def test_what_needs_no_gather_is_not_refused(layouts):
    assert lowered(matmul(32, 32, 32), {"x": 2, "y": 2}, layouts, strict=True).steps


def test_axes_of_one_device_are_never_refused():
    lowered(matmul(32, 32, 32), {"x": 1}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 1}}, strict=True)


def test_compile_hands_it_on():
    @T.prim_func
    def first(A: T.Tensor((33,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[1]

    annotated = mt.annotate(first, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication: .*it is the same"):
        mt.compile(annotated, target="interpret", strict=True)


def test_a_reversed_index_is_called_so():
    @T.prim_func
    def reverse(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(64, threads=1) as bx:
            B[bx] = A[63 - bx]

    annotated = mt.annotate(reverse, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="buffer 'A' dim 0 on axis 'x' needs replication: .*it is reversed"):
        mt.compile(annotated, target="interpret", strict=True)
