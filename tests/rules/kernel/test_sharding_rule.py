"""The sharding rule of whole kernels, as people read it, and why a factor can't be split."""

import pytest
import tilelang.language as T

import mesh_tensor as mt
from kernels.catalogue import CASES
from kernels.elementwise import add, add_bias, vector_add
from kernels.matmul import batched_matmul, matmul, split_k_matmul
from kernels.matmul_bias_gelu import matmul_bias_gelu
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.sharding_rule import analyse
from tests.kernels.adversarial import ADVERSARIAL_CASES

CASE = {case.name: case for case in (*CASES, *ADVERSARIAL_CASES)}

RULES = {
    "softmax": "X[m, n] -> Y[m, n]; m parallel; n max, sum",
    "three_pass_softmax": "X[m, n] -> Y[m, n]; m parallel; n max, sum",
    "online_softmax": "X[m, n] -> Y[m, n]; m parallel; n max, sum",
    "rms_norm": "X[m, n], weight[n] -> Y[m, n]; m parallel; n sum",
    "layer_norm": "X[m, n], weight[n], bias[n] -> Y[m, n]; m parallel; n sum",
    "two_pass_layer_norm": "X[m, n], weight[n], bias[n] -> Y[m, n]; m parallel; n sum",
    "flash_attention_cross": "Q[b, h, m, k], K[b, h, l, k], V[b, h, l, n] -> Out[b, h, m, n]; "
    "b, h, m, n parallel; l max, sum; k replicated",
    "reduce_rows_sum": "A[m, k] -> B[m]; m parallel; k sum",
    "reduce_rows_max": "A[m, k] -> B[m]; m parallel; k max",
    "reduce_rows_min": "A[m, k] -> B[m]; m parallel; k min",
    "reduce_rows_abssum": "A[m, k] -> B[m]; m parallel; k sum",
    "reduce_rows_absmax": "A[m, k] -> B[m]; m parallel; k max",
    "reduce_rows_bitand_int32": "A[m, k] -> B[m]; m parallel; k bitand",
    "reduce_rows_bitor_int32": "A[m, k] -> B[m]; m parallel; k bitor",
    "reduce_rows_bitxor_int32": "A[m, k] -> B[m]; m parallel; k bitxor",
    "product_rows": "A[m, k] -> B[m]; m parallel; k prod",
    "reduce_columns_sum": "A[k, m] -> B[m]; m parallel; k sum",
    "reduce_3d_dim0": "A[k, m, n] -> B[m, n]; m, n parallel; k sum",
    "reduce_3d_dim1": "A[m, k, n] -> B[m, n]; m, n parallel; k sum",
    "reduce_3d_dim2": "A[m, n, k] -> B[m, n]; m, n parallel; k sum",
    "transpose": "A[n, m] -> B[m, n]; n, m parallel",
    "tile_transpose": "A[n, m] -> B[m, n]; n, m parallel",
    "embedding": "ids[m], table[k, n] -> out[m, n]; m, n parallel; k sum",
    "add_positions": "A[m, n] -> B[m, n]; m, n parallel",
    "lower_triangle": "A[m, n] -> B[m, n]; m, n parallel",
    "masked_row_sum": "A[m, k], lengths[m] -> B[m]; m parallel; k sum",
    "stencil": "A[*] -> B[m]; m parallel",
    "flip_rows": "A[*, n] -> B[m, n]; n, m parallel",
    "convolution": "A[*], weight[k] -> B[m]; m parallel; k sum",
    "swap_seq_heads": "x[b, m, h, n] -> out[b, h, m, n]; b, m, h, n parallel",
    "atomic_row_sum": "A[m, k], B[m] -> B[m]; m parallel; k sum",
    "atomic_column_max": "A[k, m], B[m] -> B[m]; m parallel; k max",
    "accumulate_matmul": "A[m, k], B[k, n], C[m, n] -> C[m, n]; m, n parallel; k sum",
    "matmul_and_row_sum": "A[m, k], B[k, n] -> C[m, n], S[m]; m parallel; k, n sum",
    "max_and_sum": "A[m, k] -> row_max[m], row_sum[m]; m parallel; k max, sum",
    "two_products": "A[m, k], B[k, n], D[m, l], E[l, n] -> C[m, n]; m, n parallel; k, l sum",
    "outer_then_sum": "u[m], v[n] -> C[m, n], s[m]; m parallel; n sum",
    "argmax_rows": "A[m, k] -> values[m], positions[m]; m parallel; k scan",
    "largest_block_sum": "A[m, k] -> B[m]; m parallel; k scan",
    "sum_and_block_count": "A[m, k] -> B[m]; m parallel; k scan",
    "iota_13x30": " -> B[m, n]; m, n parallel",
    "dynamic_matmul": "A[m, k], B[k, n] -> C[m, n]; m, n parallel; k sum",
}

REASONS = {
    ("scatter_rows", "k"): "keeps one of many coordinates' values",
    ("chained_products", "k"): "needs the whole value of middle inside the loop that computes it",
    ("normalised_blocks", "m"): "walks two dims in different steps",
    ("rope", "n"): "does not walk a dim of 16",
}


def rule(func):
    return str(mt.sharding_rule(func))


@pytest.mark.parametrize("trans_A", [False, True])
@pytest.mark.parametrize("trans_B", [False, True])
def test_matmul(trans_A, trans_B):
    a, b = "A[k, m]" if trans_A else "A[m, k]", "B[n, k]" if trans_B else "B[k, n]"
    func = matmul(96, 64, 80, 32, 32, 16, trans_A=trans_A, trans_B=trans_B)
    assert rule(func) == f"{a}, {b} -> C[m, n]; m, n parallel; k sum"


@pytest.mark.parametrize("sizes", [(96, 64, 80), (65, 33, 17), (1, 1, 1), (8, 8, 8)], ids=str)
def test_the_rule_of_a_matmul_does_not_depend_on_its_sizes(sizes):
    assert rule(matmul(*sizes, 16, 32, 8)) == "A[m, k], B[k, n] -> C[m, n]; m, n parallel; k sum"


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (batched_matmul(2, 32, 32, 32), "A[b, m, k], B[b, k, n] -> C[b, m, n]; b, m, n parallel; k sum"),
        (matmul_bias_gelu(64, 64, 64), "A[m, k], B[k, n], bias[n] -> C[m, n]; m, n parallel; k sum"),
        (split_k_matmul(64, 64, 64), "A[m, k], B[k, n], C[m, n] -> C[m, n]; m, n parallel; k sum"),
        (vector_add(64), "A[m], B[m] -> C[m]; m parallel"),
        (add(64, 32), "A[m, n], B[m, n] -> C[m, n]; m, n parallel"),
        (add_bias(64, 32, dim=0), "A[m, n], bias[m] -> C[m, n]; m, n parallel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plain_kernels(func, expected):
    assert rule(func) == expected


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    case = CASE[name]
    assert rule(case.build(**case.sizes[0])) == RULES[name]


@pytest.mark.parametrize(("name", "factor"), REASONS)
def test_why_a_factor_is_not_split(name, factor):
    case = CASE[name]
    kinds = mt.sharding_rule(case.build(**case.sizes[0])).factors
    assert kinds[factor].startswith("whole: ")
    assert REASONS[(name, factor)] in kinds[factor]


def test_the_parts_of_a_rule():
    made = mt.sharding_rule(matmul(96, 64, 80, 32, 32, 16))
    assert made.inputs == {"A": ("m", "k"), "B": ("k", "n")}
    assert made.outputs == {"C": ("m", "n")}
    assert made.factors == {"m": "parallel", "n": "parallel", "k": "sum"}
    assert {name: int(size) for name, size in made.sizes.items()} == {"m": 96, "n": 64, "k": 80}


def test_rules_compare_by_what_they_say():
    assert mt.sharding_rule(matmul(64, 64, 64)) == mt.sharding_rule(matmul(96, 64, 80))
    assert mt.sharding_rule(matmul(64, 64, 64)) != mt.sharding_rule(matmul(64, 64, 64, trans_A=True))


def test_an_annotated_kernel_has_the_same_rule():
    func = matmul(64, 64, 64)
    annotated = mt.annotate(func, {"x": 2}, {"A": {"x": 0}})
    assert mt.sharding_rule(annotated) == mt.sharding_rule(func)


def test_more_factors_than_usual_names():
    @T.prim_func
    def five(A: T.Tensor((2, 3, 4, 5, 6), "float32"), B: T.Tensor((2, 3, 4, 5, 6), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i, j, k, m in T.Parallel(3, 4, 5, 6):
                B[bx, i, j, k, m] = A[bx, i, j, k, m]

    made = mt.sharding_rule(five)
    (dims,) = made.inputs.values()
    assert len(set(dims)) == 5, "every dim is a factor of its own"
    assert made.outputs == {"B": dims}
    assert set(made.factors.values()) == {"parallel"}


def test_what_is_no_single_kernel_is_refused():
    @T.prim_func
    def two(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=8) as bx:
            for i in T.Parallel(8):
                A[i] = bx * 1.0
        with T.Kernel(1, threads=8) as bx:
            for i in T.Parallel(8):
                A[i] = A[i] + bx

    with pytest.raises(mt.MeshTensorError) as error:
        mt.sharding_rule(two)
    assert "'two' is not one TileLang kernel" in str(error.value)
    assert "A rule is of one T.Kernel" in str(error.value)


def test_layouts_of_a_kernel_share_its_analysis():
    func = matmul(64, 64, 64, 16, 16, 16)
    plain = normalize(func)
    for mesh, layouts in (({"x": 2}, {"A": {"x": 0}}), ({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}}), ({"y": 3}, {})):
        annotated = mt.annotate(func, mesh, layouts)
        assert normalize(annotated).same_as(plain)
        assert analyse(normalize(annotated)) is analyse(plain)
    assert {"mesh_tensor_info", "mesh_tensor_mesh"}.isdisjoint(plain.attrs.keys())


def test_what_else_is_said_of_a_kernel_counts():
    func = matmul(64, 64, 64, 16, 16, 16)
    for other in (func.with_attr("global_symbol", "other"), func.with_attr("said", 1), matmul(64, 64, 64, 16, 16, 16)):
        assert not normalize(other).same_as(normalize(func))
    assert normalize(func.with_attr("said", 1)).attrs["said"] == 1
