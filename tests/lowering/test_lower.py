"""lower and LowerToLocalView: one module, one function over tiles."""

import re

import pytest
import tilelang.language as T
import tvm
from tvm import ir, tirx

import mesh_tensor as mt
from kernels.catalogue import CASES

from .kernels import gelu, matmul, scale
from .support import coordinates, nodes, text
from .test_contract_reductions import activated

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}
BOTH = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}


def only(mod):
    (func,) = mod.functions.values()
    return func


def test_the_module_has_one_function_of_the_kernels_name():
    mod = mt.lower(mt.annotate(matmul(32, 32, 32), {"x": 2}, K_SPLIT))
    assert [var.name_hint for var in mod.functions] == ["matmul"]
    assert only(mod).attrs["global_symbol"] == "matmul"


def test_parameters_are_tiles_then_coordinates():
    func = only(mt.lower(mt.annotate(matmul(32, 32, 37), {"x": 2, "y": 2}, BOTH)))
    shapes = {b.name: tuple(map(int, b.shape)) for b in func.buffer_map.values()}
    assert shapes == {"A": (16, 19), "B": (19, 32), "C": (16, 32)}
    assert coordinates(func) == ["y"]


def test_kernels_and_collectives_are_in_order():
    func = only(mt.lower(mt.annotate(activated(32, 32, 64, gelu), {"x": 2}, {**K_SPLIT, "C": {"x": 0}})))
    names = [block.name_hint for block in nodes(func, tirx.SBlock)]
    assert names == ["tilelang_root", "reduce_scatter", "tilelang_root", "root"]
    assert [b.name for b in func.body.block.alloc_buffers] == ["C_local_w1", "C_local_w1_1"]


def test_an_input_that_is_gathered_stays_a_parameter():
    func = only(mt.lower(mt.annotate(matmul(32, 32, 32), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}})))
    shapes = {b.name: tuple(map(int, b.shape)) for b in func.buffer_map.values()}
    assert shapes == {"A": (16, 32), "B": (16, 32), "C": (16, 32)}
    assert [tuple(map(int, b.shape)) for b in func.body.block.alloc_buffers] == [(32, 32)]


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_it_is_well_formed_whatever_is_split(case):
    func = case.build(**case.sizes[-1])
    ndims = {func.buffer_map[p].name: len(func.buffer_map[p].shape) for p in func.params if p in func.buffer_map}
    for dim in range(2):
        layouts = {name: {"x": min(dim, n - 1), "y": n - 1} for name, n in ndims.items()}
        local = only(mt.lower(mt.annotate(func, {"x": 2, "y": 3}, layouts)))
        assert tirx.analysis.verify_well_formed(local, assert_mode=False)


def test_symbolic_sizes_and_scalars_are_shared_by_all_kernels():
    rows = T.dynamic("rows")

    @T.prim_func
    def kernel(A: T.Tensor((rows, 32), "float32"), B: T.Tensor((rows,), "float32"), n: T.int32):
        with T.Kernel(T.ceildiv(rows, 8), threads=32) as bx:
            a = T.alloc_shared((8, 32), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(A[bx * 8, 0], a)
            for i, j in T.Parallel(8, 32):
                a[i, j] = T.if_then_else(j < n, a[i, j], 0.0)
            T.reduce_sum(a, b, dim=1)
            for i in T.Parallel(8):
                b[i] = T.exp(b[i]) + T.Cast("float32", n)
            T.copy(b, B[bx * 8])

    layouts = {"A": {"x": 0, "y": 1}, "B": {"x": 0}}
    func = only(mt.lower(mt.annotate(kernel, {"x": 2, "y": 2}, layouts)))
    assert coordinates(func) == ["n", "rows", "y"]
    assert tirx.analysis.verify_well_formed(func, assert_mode=False)
    assert len({var for var in nodes(func, tirx.Var) if var.name in ("rows", "n")}) == 2


def test_thousands_of_devices_give_the_same_text_but_for_extents():
    def shown(n):
        return text(only(mt.lower(mt.annotate(matmul(4096, 64, 4096), {"x": n, "y": n}, BOTH))))

    numbers = re.compile(r"\d+")
    assert numbers.sub("#", shown(2)) == numbers.sub("#", shown(4)) == numbers.sub("#", shown(8))
    assert shown(2).count("\n") == shown(64).count("\n"), "4 devices and 4096"


# -- as a pass ---------------------------------------------------------------------------------------------------------


def test_the_pass_gives_what_lower_gives():
    func = mt.annotate(activated(32, 32, 64, gelu), {"x": 2}, K_SPLIT)
    mod = ir.IRModule({func.attrs["global_symbol"]: func})
    by_pass = mt.lowering.LowerToLocalView()(mod)
    ir.assert_structural_equal(by_pass, mt.lower(func))


def test_in_a_sequential_of_the_users():
    func = mt.annotate(matmul(32, 32, 32), {"x": 2}, K_SPLIT)
    seen = []

    @tvm.transform.module_pass(opt_level=0, name="look")
    def look(mod, _):
        seen.append([str(var.name_hint) for var in mod.functions])
        return mod

    passes = tvm.transform.Sequential([look, mt.lowering.LowerToLocalView(), look])
    ir.assert_structural_equal(passes(ir.IRModule({"matmul": func})), mt.lower(func))
    assert seen == [["matmul"], ["matmul"]]


def test_functions_without_annotations_are_left_alone():
    other = scale(32, 16)
    func = mt.annotate(matmul(32, 32, 32), {"x": 2}, K_SPLIT)
    mod = mt.lowering.LowerToLocalView()(ir.IRModule({"matmul": func, "scale": other}))
    ir.assert_structural_equal(mod["scale"], other)
    ir.assert_structural_equal(mod["matmul"], mt.lower(func)["matmul"])


def test_the_module_that_was_given_is_not_changed():
    func = mt.annotate(matmul(32, 32, 32), {"x": 2}, K_SPLIT)
    mod = ir.IRModule({"matmul": func})
    mt.lowering.LowerToLocalView()(mod)
    assert mod["matmul"].same_as(func)


def test_the_pass_can_be_strict():
    func = mt.annotate(matmul(32, 32, 32), {"x": 2}, {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 0}})
    mod = ir.IRModule({"matmul": func})
    mt.lowering.LowerToLocalView()(mod)
    with pytest.raises(mt.MeshTensorError, match="buffer 'B' is annotated sharded on dim 1"):
        mt.lowering.LowerToLocalView(strict=True)(mod)
