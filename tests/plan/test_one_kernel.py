"""What every axis splits, why, and in which layouts the kernel then takes and leaves its buffers."""

import pytest
import tilelang.language as T
from tvm import tirx

from kernels.elementwise import add
from kernels.matmul import matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu
from kernels.reduce import reduce_rows
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax
from mesh_tensor import Mesh, Sharding
from mesh_tensor.plan.one_kernel import KernelDecision
from mesh_tensor.plan.tir_rule import rule_of_analysis
from mesh_tensor.rules.kernel.factors import tile_extent
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.sharding_rule import analyse
from tests.lowering.kernels import scale

MATMUL = matmul(64, 64, 64, 16, 16, 16)
TALL = matmul(512, 16, 16, 16, 16, 16)


def decide(func, mesh, shardings, **options):
    """The assignment of an annotated kernel."""
    mesh = Mesh(mesh)
    analysis = analyse(normalize(func))
    ndims = {name: len(buffer.shape) for name, buffer in analysis.kernel.params.items()}
    asked = {name: Sharding.make(mesh, ndims[name], layout) for name, layout in shardings.items()}
    return KernelDecision(analysis, mesh, asked, **options).decide()


def splits(assignment):
    """Axis -> factor's name."""
    return {axis: factor.name if factor else None for axis, factor in assignment.axes.items()}


def layouts(found):
    return {name: str(layout) for name, layout in found.items()}


def test_unanimous_annotations_are_followed():
    found = decide(MATMUL, {"x": 2, "y": 2}, {"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 1}})
    assert splits(found) == {"x": "m", "y": "n"}
    assert found.reasons == {"x": "as annotated", "y": "as annotated"}
    assert layouts(found.needed) == {"A": "S[0], R", "B": "R, S[1]"}
    assert layouts(found.produced) == {"C": "S[0], S[1]"}
    assert not found.whole


def test_an_axis_that_nothing_asks_for_splits_nothing():
    found = decide(MATMUL, {"x": 2, "y": 2}, {"A": {"x": 0}, "C": {"x": 0}})
    assert splits(found) == {"x": "m", "y": None}
    assert found.reasons["y"] == "no annotation uses it"


def test_inputs_that_agree_on_a_reduced_factor_leave_the_output_partial():
    found = decide(MATMUL, {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}})
    assert splits(found) == {"x": "k"}
    assert layouts(found.produced) == {"C": "P[sum]"}


def test_inputs_that_agree_on_a_reduced_factor_win_over_an_output_that_uses_the_axis():
    # One reduce-scatter, instead of an exchange and a gather.
    found = decide(MATMUL, {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}})
    assert splits(found) == {"x": "k"}
    assert found.reasons["x"] == "it costs least"
    assert layouts(found.produced) == {"C": "P[sum]"}, "a reduce-scatter brings it to S[0]"


def test_a_large_output_is_not_reduced_for_small_inputs():
    found = decide(matmul(4096, 4096, 16, 16, 16, 16), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}})
    assert splits(found) == {"x": "m"}, "A and B are smaller than C, even together"
    assert layouts(found.needed) == {"A": "S[0]", "B": "R"}


def test_the_fewest_collectives_win_where_little_is_moved():
    # k: an exchange of B and a reduce-scatter of C. n: a gather of A and an exchange of C. m: an exchange and a gather.
    found = decide(MATMUL, {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 1}})
    assert splits(found) == {"x": "n"}, "A alone is gathered"
    assert layouts(found.needed) == {"A": "R", "B": "S[1]"}


def test_outputs_decide_where_costs_tie():
    # The same tensor is exchanged before or after.
    found = decide(scale(64, 64), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}})
    assert splits(found) == {"x": "m"}
    assert found.reasons["x"] == "it costs least"
    assert layouts(found.needed) == {"A": "S[0]"}


def test_one_exchange_is_cheaper_than_two():
    found = decide(add(64, 64), {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 0}})
    assert splits(found) == {"x": "n"}
    assert layouts(found.produced) == {"C": "S[1]"}


def test_the_larger_tensor_stays_where_it_is():
    # A is 32 times as large as B: moving B is cheaper than moving A.
    found = decide(TALL, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    assert splits(found) == {"x": "m"}
    wide = decide(matmul(16, 512, 16, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 1}})
    assert splits(wide) == {"x": "n"}


def test_an_output_that_is_replicated_is_gathered_only_if_that_is_cheaper():
    # Splitting m as A asks: C is gathered. Splitting nothing: A is.
    large_output = decide(matmul(64, 512, 16, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "C": {}})
    assert splits(large_output) == {"x": None}
    large_input = decide(matmul(64, 16, 512, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "C": {}})
    assert splits(large_input) == {"x": "m"}


def test_the_output_that_is_cheaper_to_satisfy_wins_where_outputs_disagree():
    N = 64

    @T.prim_func
    def copies(A: T.Tensor((N, N), "float32"), B: T.Tensor((N, N), "float32"), C: T.Tensor((N, N), "float16")):
        with T.Kernel(N // 8, N // 8, threads=32) as (bx, by):
            for i, j in T.Parallel(8, 8):
                B[by * 8 + i, bx * 8 + j] = A[by * 8 + i, bx * 8 + j]
                C[by * 8 + i, bx * 8 + j] = A[by * 8 + i, bx * 8 + j]

    asked = {"B": {"x": 0}, "C": {"x": 1}}
    assert splits(decide(copies, {"x": 2}, {"A": {"x": 0}, **asked})) == {"x": "m"}, "B is twice as large as C"
    assert splits(decide(copies, {"x": 2}, {"A": {}, **asked})) == {"x": None}, "it is all there: nothing is moved"


def test_two_axes_on_one_dim():
    found = decide(MATMUL, {"x": 2, "y": 2}, {"A": {"x": 0, "y": 0}, "C": {"x": 0, "y": 0}})
    assert splits(found) == {"x": "m", "y": "m"}
    assert layouts(found.produced) == {"C": "S[0], S[0]"}
    assert found.axes["x"] is found.axes["y"]
    assert found.axes_of(found.axes["x"]) == ("x", "y")


def test_what_is_not_annotated_follows():
    found = decide(MATMUL, {"x": 2, "y": 2}, {"C": {"x": 0, "y": 1}})
    assert layouts(found.needed) == {"A": "S[0], R", "B": "R, S[1]"}


@pytest.mark.parametrize(("op", "start"), [("sum", "P[sum]"), ("max", "R")])
def test_what_is_updated_in_place_comes_in_partial_unless_the_operation_is_idempotent(op, start):
    atomic = {"sum": T.atomic_add, "max": T.atomic_max}[op]

    @T.prim_func
    def update(A: T.Tensor((32, 16), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(4, threads=16) as bx:
            for i, j in T.Parallel(8, 16):
                atomic(B[j], A[bx * 8 + i, j])

    found = decide(update, {"x": 2}, {"A": {"x": 0}})
    assert layouts(found.produced) == {"B": f"P[{op}]"}
    assert layouts(found.needed) == {"A": "S[0]", "B": start}


def block_numbers(M=64, block=8):
    """B[m] is the number of its block: tiles have to be whole blocks."""

    @T.prim_func
    def numbers(B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=8) as bx:
            for i in T.Parallel(block):
                B[bx * block + i] = T.Cast("float32", bx)

    return numbers


def test_axes_that_would_split_blocks_are_dropped():
    found = decide(block_numbers(), {"x": 2, "y": 4}, {"B": {"x": 0, "y": 0}})
    assert splits(found) == {"x": "m", "y": "m"}, "tiles of 32 and of 8 are whole blocks"
    found = decide(block_numbers(), {"x": 2, "y": 8}, {"B": {"x": 0, "y": 0}})
    assert splits(found) == {"x": "m", "y": None}
    assert "bx is used as a value" in found.reasons["y"]
    assert "not whole blocks of 8" in found.reasons["y"]
    assert found.whole[("B", 0)] == found.reasons["y"]
    assert layouts(found.produced) == {"B": "S[0], R"}


def test_alignment_does_not_matter_on_axes_of_one_device():
    found = decide(block_numbers(60), {"x": 1}, {"B": {"x": 0}})
    assert splits(found) == {"x": "m"}


def test_dims_that_are_needed_whole_are_named_with_the_reason():
    @T.prim_func
    def flip(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[31 - (bx * 8 + i)]

    found = decide(flip, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    assert list(found.whole) == [("A", 0)]
    assert "it is reversed" in found.whole[("A", 0)]
    assert layouts(found.needed) == {"A": "R"}
    assert decide(flip, {"x": 2}, {"A": {"x": 0}}).reasons["x"] == "what it should split is needed whole"


def test_banned_factors_are_not_split():
    banned = {("A", 1): "it can't be"}
    found = decide(MATMUL, {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}, banned=banned)
    assert splits(found) == {"x": None}
    assert found.whole[("A", 1)] == "it can't be"


def test_axes_that_an_earlier_part_decided_stay():
    analysis = analyse(normalize(MATMUL))
    mesh = Mesh({"x": 2})
    asked = {"C": Sharding.make(mesh, 2, {"x": 1})}
    m = analysis.factor_of("C", 0)
    found = KernelDecision(analysis, mesh, asked, fixed={"x": m}).decide()
    assert found.axes == {"x": m}
    assert found.reasons["x"] == "decided before"


# -- collectives inside the kernel -------------------------------------------------------------------------------------

COLUMNS = {"X": {"x": 1}, "Y": {"x": 1}}


def test_one_gather_of_short_rows_is_cheaper_than_two_reductions_of_many():
    found = decide(softmax(4096, 4), {"x": 2}, COLUMNS)
    assert splits(found) == {"x": None}
    assert found.reasons["x"] == "it costs least"
    assert layouts(found.needed) == {"X": "R"}


def test_long_rows_are_reduced_inside_the_kernel():
    found = decide(softmax(512, 8192), {"x": 2}, COLUMNS)
    assert splits(found) == {"x": "n"}
    assert layouts(found.needed) == {"X": "S[1]"}


def test_a_single_reduction_beats_a_gather_at_any_length():
    assert splits(decide(rms_norm(16, 32), {"x": 2}, COLUMNS)) == {"x": "n"}


def test_in_place_nothing_is_gathered():
    assert splits(decide(softmax(4096, 4), {"x": 2}, COLUMNS, in_place=True)) == {"x": "n"}


def test_the_rows_of_other_devices_cost_nothing():
    """What another axis splits is reduced in parts."""
    rows = {"X": {"x": 1, "y": 0}, "Y": {"x": 1, "y": 0}}
    assert splits(decide(softmax(4096, 4), {"x": 2, "y": 2}, rows)) == {"x": None, "y": "m"}


def test_what_is_reduced_inside_a_kernel_is_in_its_rule():
    analysis = analyse(normalize(softmax(64, 128)))
    rule = rule_of_analysis(analysis, ["X"], ["Y"], analysis.factors)
    assert [(one.factor, one.op, one.dims, one.shape, one.dtype, one.ends) for one in rule.inner] == [
        ("n", "max", ("m",), (64,), "float32", False),
        ("n", "sum", ("m",), (64,), "float32", False),
    ]
    assert not any(rule.partial)


def test_a_factor_that_ends_inside_leaves_its_axis_to_the_output():
    """gelu of a sum over k: what completes it may be a reduce-scatter."""
    analysis = analyse(normalize(matmul_bias_gelu(64, 64, 64)))
    (inner,) = rule_of_analysis(analysis, ["A", "B", "bias"], ["C"], analysis.factors).inner
    assert (inner.factor, inner.op, inner.dims, inner.shape, inner.ends) == ("k", "sum", ("m", "n"), (64, 64), True)


def test_reductions_are_split_as_asked():
    found = decide(reduce_rows(64, 64, "sum"), {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"x": 0}})
    assert splits(found) == {"x": "m", "y": "k"}
    assert layouts(found.produced) == {"B": "S[0], P[sum]"}


@pytest.mark.parametrize(("size", "parts", "tile"), [(7, [2], 4), (7, [2, 2], 2), (8, [1], 8), (0, [3], 0), (5, [], 5)])
def test_tiles_round_up(size, parts, tile):
    assert tile_extent(size, parts) == tile


def test_symbolic_tiles():
    n = tirx.Var("n", "int32")
    assert str(tile_extent(n, [1, 4])) == "(n + 3) // 4"
    assert tile_extent(n, [1]) is n
