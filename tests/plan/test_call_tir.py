"""Modules that call TIR functions as TE makes them, against one device, and against torch."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import from_source
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tirx as T

import mesh_tensor as mt
from mesh_tensor.program.steps import KernelStep, OpStep

from .step_modules import collectives, legalized, module, moves, operands
from .tir_modules import calling


@I.ir_module
class Mlp:
    @R.function
    def main(
        x: R.Tensor((2, 6, 8), "float32"),
        w1: R.Tensor((8, 12), "float32"),
        b1: R.Tensor((12,), "float32"),
        w2: R.Tensor((12, 8), "float32"),
    ):
        with R.dataflow():
            h = R.nn.gelu(R.add(R.matmul(x, w1), b1))
            z = R.add(x, R.matmul(h, w2))
            R.output(z)
        return z


@I.ir_module
class Norms:
    @R.function
    def main(x: R.Tensor((5, 9), "float32"), g: R.Tensor((9,), "float32"), b: R.Tensor((9,), "float32")):
        with R.dataflow():
            n = R.nn.layer_norm(x, g, b, axes=[-1])
            s = R.nn.softmax(n, axis=-1)
            t = R.permute_dims(s)
            m = R.argmax(s, axis=1)
            c = R.concat([s, n], axis=1)
            z = R.sum(s, axis=[0])
            R.output(t, m, c, z)
        return t, m, c, z


@I.ir_module
class Seed:
    """The module of TVM's DistIR documents in global view, with its TIR functions."""

    I.module_attrs({"device_num": 10})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((1,), I.Range(4, 5))]})

    @T.prim_func
    def matmul(
        A: T.Buffer((T.int64(128), T.int64(128)), "float32"),
        B: T.Buffer((T.int64(128), T.int64(128)), "float32"),
        matmul_1: T.Buffer((T.int64(128), T.int64(128)), "float32"),
    ):
        T.func_attr({"tir.noalias": T.bool(True)})
        for i0, i1, k in T.grid(T.int64(128), T.int64(128), T.int64(128)):
            with T.sblock("matmul"):
                v_i0, v_i1, v_k = T.axis.remap("SSR", [i0, i1, k])
                T.reads(A[v_i0, v_k], B[v_k, v_i1])
                T.writes(matmul_1[v_i0, v_i1])
                with T.init():
                    matmul_1[v_i0, v_i1] = T.float32(0)
                matmul_1[v_i0, v_i1] = matmul_1[v_i0, v_i1] + A[v_i0, v_k] * B[v_k, v_i1]

    @R.function
    def foo(
        x: R.DTensor((128, 128), "float32", "mesh[0]", "R"),
        weight1: R.DTensor((128, 128), "float32", "mesh[0]", "S[1]"),
        weight2: R.DTensor((128, 128), "float32", "mesh[0]", "S[0]"),
    ) -> R.DTensor((128, 128), "float32", "mesh[0]", "R"):
        cls = Seed
        lv0 = R.dist.call_tir(cls.matmul, (x, weight1), out_sinfo=R.DTensor((128, 128), "float32", "mesh[0]", "S[1]"))
        lv1: R.DTensor((128, 128), "float32", "mesh[0]", "S[1]") = R.nn.gelu(lv0)
        lv3 = R.dist.call_tir(cls.matmul, (lv1, weight2), out_sinfo=R.DTensor((128, 128), "float32", "mesh[0]", "R"))
        return lv3


@I.ir_module
class SeedInLocalView:
    """What the document lowers that to, its first function: of one device's tiles."""

    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

    @T.prim_func
    def halves(A: T.Buffer((T.int64(8), T.int64(4)), "float32"), B: T.Buffer((T.int64(8), T.int64(4)), "float32")):
        for i, j in T.grid(T.int64(8), T.int64(4)):
            with T.sblock("halves"):
                v_i, v_j = T.axis.remap("SS", [i, j])
                T.reads(A[v_i, v_j])
                T.writes(B[v_i, v_j])
                B[v_i, v_j] = A[v_i, v_j] * T.float32(0.5)

    @R.function
    def foo(x: R.DTensor((8, 8), "float32", "mesh[0]", "S[1]")):
        cls = SeedInLocalView
        return R.dist.call_tir_local_view(cls.halves, (x,), out_sinfo=R.DTensor((8, 8), "float32", "mesh[0]", "S[1]"))


@pytest.mark.parametrize("replicate", [False, True])
def test_local_views_are_refused_by_name(replicate):
    with pytest.raises(mt.MeshTensorError, match="R.dist.call_tir_local_view is of TVM's local view") as error:
        mt.distribute_module(SeedInLocalView, replicate_unknown=replicate)
    assert "R.dist.call_tir), or say what one device does by mt.manual_computation" in str(error.value)


MLP_SHARDINGS = [
    {"w1": {"x": 1}, "b1": {"x": 0}, "w2": {"x": 0}},
    {"x": {"x": 0}},
    {"x": {"x": 1}},
    {"w1": {"x": 0}},
    {"w1": {"x": 1}, "z": {"x": 1}},
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shardings", MLP_SHARDINGS, ids=str)
def test_legalized_mlp_has_the_collectives_of_its_operators(shardings, size):
    data = operands(Mlp)
    as_operators = mt.distribute_module(Mlp, {"x": size}, shardings)
    as_functions = mt.distribute_module(legalized(Mlp), {"x": size}, shardings)
    torch.testing.assert_close(as_functions(*data), mt.run_sequential(Mlp, data), rtol=1e-4, atol=1e-5)
    assert moves(as_functions) == moves(as_operators)
    assert not any(isinstance(step, OpStep) for step in as_functions.program.steps)


def test_legalized_mlp_on_two_axes():
    data = operands(Mlp)
    shardings = {"x": {"data": 0}, "w1": {"model": 1}, "w2": {"model": 0}}
    made = mt.distribute_module(legalized(Mlp), {"data": 2, "model": 2}, shardings)
    torch.testing.assert_close(made(*data), mt.run_sequential(Mlp, data), rtol=1e-4, atol=1e-5)
    assert collectives(made) == ["all_reduce"]


@pytest.mark.parametrize(
    "sharding", [{"x": 0}, {"x": 1}, {"x": 0, "y": 1}, {"x": 1, "y": 0}, {"x": 1, "y": 1}], ids=str
)
def test_legalized_norms(sharding):
    mesh = {"x": 2, "y": 2} if "y" in sharding else {"x": 3}
    data = operands(Norms)
    made = mt.distribute_module(legalized(Norms), mesh, {"x": sharding})
    for result, expected in zip(made(*data), mt.run_sequential(Norms, data), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_softmax_of_a_split_dim_sends_rows_and_not_the_tensor():
    mod = legalized(module({"x": (6, 64)}, [("y", lambda bb, env: relax.op.nn.softmax(env["x"], axis=-1))]))
    made = mt.distribute_module(mod, {"x": 4}, {"x": {"x": 1}})
    data = operands(mod)
    torch.testing.assert_close(made(*data), torch.softmax(data[0], -1))
    assert [step.op for step in made.program.steps if hasattr(step, "op")] == ["max", "sum"]
    assert all(step.bytes <= 2 * 6 * 4 for step in made.program.steps if hasattr(step, "bytes"))


def test_pending_sums_are_carried_through_functions_that_are_linear():
    def product(a, b):
        return lambda bb, env: relax.op.matmul(env[a], env[b])

    steps = [
        ("a", product("x", "w")),
        ("b", product("y", "v")),
        ("c", lambda bb, env: relax.op.add(env["a"], env["b"])),
        ("t", lambda bb, env: relax.op.permute_dims(env["c"])),
    ]
    mod = legalized(module({"x": (4, 8), "w": (8, 6), "y": (4, 8), "v": (8, 6)}, steps))
    made = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "w": {"x": 0}, "y": {"x": 1}, "v": {"x": 0}})
    data = operands(mod)
    torch.testing.assert_close(made(*data), (data[0] @ data[1] + data[2] @ data[3]).T)
    assert collectives(made) == ["all_reduce"]


@pytest.mark.parametrize("pending", [True, False], ids=["a number", "what may be 0"])
def test_pending_sums_are_completed_before_a_function_with_a_pole(pending):
    def quotient(builder, env):
        return relax.op.divide(env["a"], relax.const(3.0) if pending else env["v"])

    def root(builder, env):
        return relax.op.exp(env["v"]) if pending else relax.op.rsqrt(env["v"])

    steps = [
        ("a", lambda bb, env: relax.op.sum(env["x"], [0])),
        ("q", quotient),
        ("b", lambda bb, env: relax.op.sum(relax.op.square(env["x"]), [0])),
        ("r", root),
        ("p", lambda bb, env: relax.op.multiply(env["b"], env["r"])),
        ("z", lambda bb, env: relax.op.stack([env["q"], env["p"]])),
    ]
    made = mt.distribute_module(
        legalized(module({"x": (6, 4), "v": (4,)}, steps)), {"x": 2}, {"x": {"x": 0}}, target="interpret"
    )
    x, v = torch.randn(6, 4), torch.tensor([0.0, 1.0, 0.0, 2.0])
    x[:3, 0], x[3:, 0] = 2.0, -1.0  # parts of other signs
    wanted = torch.stack([x.sum(0) / (3 if pending else v), x.square().sum(0) * (v.exp() if pending else v.rsqrt())])
    torch.testing.assert_close(made(x, v), wanted)
    completed = [step.reason.split()[0] for step in made.program.collectives]
    assert completed == (["main.q", "main.p"] if pending else ["main.a", "main.b"])


def test_what_is_scattered_is_not_reduced_whole():
    mod = legalized(module({"x": (4, 8), "w": (8, 6)}, [("a", lambda bb, env: relax.op.matmul(env["x"], env["w"]))]))
    made = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 1}, "w": {"x": 0}, "a": {"x": 0}})
    data = operands(mod)
    torch.testing.assert_close(made(*data), data[0] @ data[1])
    assert collectives(made) == ["reduce_scatter"]


def test_functions_that_regroup_dims_split_as_operators_do():
    steps = [
        ("heads", lambda bb, env: relax.op.reshape(env["x"], (2, 6, 4, 2))),
        ("first", lambda bb, env: relax.op.permute_dims(env["heads"], (0, 2, 1, 3))),
        ("flat", lambda bb, env: relax.op.reshape(env["first"], (8, 6, 2))),
        ("twice", lambda bb, env: relax.op.add(env["flat"], env["flat"])),
        ("apart", lambda bb, env: relax.op.reshape(env["twice"], (2, 4, 6, 2))),
        ("back", lambda bb, env: relax.op.permute_dims(env["apart"], (0, 2, 1, 3))),
        ("z", lambda bb, env: relax.op.reshape(env["back"], (2, 6, 8))),
    ]
    mod = module({"x": (2, 6, 8)}, steps)
    (data,) = operands(mod)
    for sharding, size in (({"x": 2}, 2), ({"x": 2}, 4), ({"x": 0}, 2), ({"x": 1}, 3)):
        as_operators = mt.distribute_module(mod, {"x": size}, {"x": sharding})
        as_functions = mt.distribute_module(legalized(mod), {"x": size}, {"x": sharding})
        torch.testing.assert_close(as_functions(data), 2 * data)
        assert moves(as_functions) == moves(as_operators) == []


@pytest.mark.parametrize("dim", range(4))
def test_legalized_attention(dim):
    """Functions on merged batch and heads are split along each of them."""

    def attention(bb, env):
        return relax.op.nn.attention(env["q"], env["k"], env["v"], causal_mask="TopLeft")

    mod = module(dict.fromkeys("qkv", (2, 6, 4, 8)), [("z", attention)])
    data = operands(mod)
    made = mt.distribute_module(legalized(mod), {"x": 2}, {name: {"x": dim} for name in "qkv"}, target="interpret")
    torch.testing.assert_close(made(*data), mt.run_sequential(mod, data), rtol=1e-4, atol=1e-5)
    assert dim not in (0, 2) or collectives(made) == []
    local = made.local_module
    tvm.ir.assert_structural_equal(from_source(local.script()), local)


@pytest.mark.parametrize(("size", "dim"), [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 0)])
def test_indices_as_values_where_dims_are_taken_apart(size, dim):
    """The place in a merged dim is made of the places in its atoms; 5 and 3 are not split evenly."""

    @T.prim_func
    def ramp(A: T.Buffer((20, 15), "float32"), C: T.Buffer((20, 15), "float32"), s: T.Buffer((20,), "float32")):
        for i, j in T.grid(20, 15):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] * T.Cast("float32", vi * 100 + vj)
        for i, k in T.grid(20, 15):
            with T.sblock("s"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + T.exp(A[vi, vk]) * T.Cast("float32", vk)

    def called(bb, env):
        info = [relax.TensorStructInfo((20, 15), "float32"), relax.TensorStructInfo((20,), "float32")]
        return relax.op.call_tir(bb.add_func(ramp, "ramp"), [env["f"]], info)

    steps = [
        ("f", lambda bb, env: relax.op.reshape(env["x"], (20, 15))),
        ("both", called),
        ("C", lambda bb, env: relax.op.reshape(relax.TupleGetItem(env["both"], 0), (4, 5, 3, 5))),
        ("s", lambda bb, env: relax.op.reshape(relax.TupleGetItem(env["both"], 1), (4, 5))),
        ("z", lambda bb, env: relax.op.add(relax.op.sum(env["C"], axis=[2, 3]), env["s"])),
    ]
    mod = module({"x": (4, 5, 3, 5)}, steps)
    (data,) = operands(mod)
    for target in ("interpret", "c"):
        made = mt.distribute_module(mod, {"x": size}, {"x": {"x": dim}}, target=target)
        torch.testing.assert_close(made(data), mt.run_sequential(mod, [data]), rtol=1e-4, atol=1e-3)
        assert "all_gather" not in collectives(made)


def test_the_seeds_module():
    data = [torch.randn(128, 128) for _ in range(3)]
    made = mt.distribute_module(Seed, function="foo")
    expected = torch.nn.functional.gelu(data[0] @ data[1]) @ data[2]
    torch.testing.assert_close(made(*data), expected, rtol=1e-4, atol=1e-3)
    assert collectives(made) == ["all_reduce"]


@T.prim_func
def moments(A: T.Buffer((7, 9), "float32"), total: T.Buffer((7,), "float32"), bound: T.Buffer((7,), "float32")):
    for i, k in T.grid(7, 9):
        with T.sblock("total"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                total[vi] = T.float32(0)
            total[vi] = total[vi] + A[vi, vk]
    for i, k in T.grid(7, 9):
        with T.sblock("bound"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                bound[vi] = T.min_value("float32")
            bound[vi] = T.max(bound[vi], A[vi, vk] - total[vi])


@pytest.mark.parametrize("dim", [0, 1])
def test_functions_with_several_results(dim):
    def called(bb, env):
        info = [relax.TensorStructInfo((7,), "float32")] * 2
        return relax.op.call_tir(bb.add_func(moments, "moments"), [env["A"]], info)

    mod = module({"A": (7, 9)}, [("both", called)])
    (data,) = operands(mod)
    total, bound = mt.distribute_module(mod, {"x": 2}, {"A": {"x": dim}})(data)
    torch.testing.assert_close(total, data.sum(1))
    torch.testing.assert_close(bound, (data - data.sum(1, keepdim=True)).amax(1))


@T.prim_func
def scaled(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7, 9), "float32"), offset: T.int64):
    for i, j in T.grid(7, 9):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] + T.Cast("float32", offset + T.Cast("int64", vi))


def test_numbers():
    mod = calling(scaled, "scaled", (3,))
    (data,) = operands(mod)
    made = mt.distribute_module(mod, {"x": 2}, {"A": {"x": 0}})
    torch.testing.assert_close(made(data), data + torch.arange(3.0, 10.0)[:, None])


def test_indices_in_padding_are_no_accident():
    """Tiles are 3, 3 and 1 long; what lies behind the last index is taken, too."""

    @T.prim_func
    def below_five(A: T.Buffer((7,), "int64"), C: T.Buffer((7,), "int64")):
        for i in range(7):
            with T.sblock("C"):
                vi = T.axis.spatial(7, i)
                C[vi] = A[vi] % T.int64(5)

    def called(bb, env):
        return relax.op.call_tir(
            bb.add_func(below_five, "below_five"), [env["i"]], relax.TensorStructInfo((7,), "int64")
        )

    steps = [("j", called), ("rows", lambda bb, env: relax.op.take(env["t"], env["j"], axis=0))]
    mod = module({"t": (5, 4), "i": (7,)}, steps, dtypes={"i": "int64"})
    table, indices = torch.randn(5, 4), torch.randint(0, 100, (7,))
    made = mt.distribute_module(mod, {"x": 3}, {"i": {"x": 0}})
    for _ in range(5):
        torch.testing.assert_close(made(table, indices), table[indices % 5])


def test_local_module_of_functions_parses():
    made = mt.distribute_module(legalized(Norms), {"x": 2}, {"x": {"x": 1}})
    local = made.local_module
    tvm.ir.assert_structural_equal(from_source(local.script()), local)
    text = local.script()
    assert "R.call_tir(cls.layer_norm_0_local" in text
    assert 'R.call_pure_packed("mesh.all_reduce"' in text
    assert 'R.call_pure_packed("mesh.coordinates", R.str("x")' in text


def test_kernels_in_called_functions():
    mod = legalized(NestedFunctions)
    data = operands(mod)
    made = mt.distribute_module(mod, {"x": 2}, {"w": {"x": 1}, "v": {"x": 0}})
    torch.testing.assert_close(made(*data), mt.run_sequential(mod, data), rtol=1e-4, atol=1e-5)
    assert collectives(made) == ["all_reduce", "all_reduce"]
    tvm.ir.assert_structural_equal(from_source(made.local_module.script()), made.local_module)
    assert sum(isinstance(step, KernelStep) for step in made.program.steps) == 6


@I.ir_module
class NestedFunctions:
    @R.function(private=True)
    def layer(
        x: R.Tensor((5, 8), "float32"), w: R.Tensor((8, 12), "float32"), v: R.Tensor((12, 8), "float32")
    ) -> R.Tensor((5, 8), "float32"):
        with R.dataflow():
            h = R.nn.relu(R.matmul(x, w))
            y = R.matmul(h, v)
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor((5, 8), "float32"), w: R.Tensor((8, 12), "float32"), v: R.Tensor((12, 8), "float32")):
        cls = NestedFunctions
        with R.dataflow():
            a = cls.layer(x, w, v)
            b = cls.layer(a, w, v)
            R.output(b)
        return b


@pytest.mark.parametrize("layout", [{}, {"x": 0}], ids=str)
def test_kernels_declared_with_other_strides(layout):
    @T.prim_func
    def doubled(x: T.handle, y: T.handle):
        X = T.match_buffer(x, (13, 10), "float32", strides=(1, 13))
        Y = T.match_buffer(y, (13, 10), "float32", strides=(12, 1))
        for i, j in T.grid(13, 10):
            with T.sblock("Y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] * T.float32(2)

    def called(bb, env):
        return relax.op.call_tir(
            bb.add_func(doubled, "doubled"), [env["A"]], relax.TensorStructInfo((13, 10), "float32")
        )

    mod = module({"A": (13, 10)}, [("z", called)])
    (data,) = operands(mod)
    torch.testing.assert_close(mt.distribute_module(mod, {"x": 2}, {"A": layout})(data), data * 2)
