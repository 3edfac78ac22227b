"""TIR functions whose buffers are views of each other: right, or refused by name."""

from __future__ import annotations

import pytest
import torch
from tvm.script import tirx as T

import mesh_tensor as mt

from .step_modules import call, module, operands


@T.prim_func
def reads_a_view(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    flat = T.decl_buffer((48,), "float32", data=A.data)
    for i, j in T.grid(8, 6):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = flat[vi * 6 + vj] * T.float32(2)


@T.prim_func(check_well_formed=False)
def writes_a_view_only(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    flat = T.Buffer((48,), "float32", data=B.data)
    for i, j in T.grid(8, 6):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            flat[vi * 6 + vj] = A[vi, vj] * T.float32(2)


@T.prim_func(check_well_formed=False)
def writes_a_view_of_what_it_wrote(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    flat = T.Buffer((48,), "float32", data=B.data)
    for i, j in T.grid(8, 6):
        with T.sblock("take"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj]
    for i, j in T.grid(8, 6):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            flat[vi * 6 + vj] = B[vi, vj] * T.float32(2)


@T.prim_func(check_well_formed=False)
def reads_what_a_view_wrote(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    flat = T.Buffer((48,), "float32", data=B.data)
    for i, j in T.grid(8, 6):
        with T.sblock("take"):
            vi, vj = T.axis.remap("SS", [i, j])
            flat[vi * 6 + vj] = A[vi, vj]
    for i, j in T.grid(8, 6):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = flat[vi * 6 + vj] * T.float32(2)


@T.prim_func
def a_part_of_a_buffer(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    for i in range(8):
        with T.sblock("scale"):
            vi = T.axis.spatial(8, i)
            T.reads(A[vi, 0:6])
            T.writes(B[vi, 0:6])
            row = T.match_buffer(A[vi, 0:6], (6,), "float32", offset_factor=1)
            for j in range(6):
                B[vi, j] = row[j] * T.float32(2)


@T.prim_func(check_well_formed=False)
def halves_of_elements(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (8, 6), "float32")
    B = T.match_buffer(b, (8, 6), "float32")
    source = T.Buffer((96,), "uint16", data=A.data)
    target = T.Buffer((96,), "uint16", data=B.data)
    for i in range(96):
        with T.sblock("take"):
            vi = T.axis.spatial(96, i)
            target[vi] = source[vi]


def calling(func, name):
    return module({"x": (8, 6)}, [("y", call(func.with_attr("global_symbol", name), "x", shape=(8, 6)))])


@pytest.mark.parametrize(
    "func", [reads_a_view, writes_a_view_only, writes_a_view_of_what_it_wrote, reads_what_a_view_wrote]
)
@pytest.mark.parametrize("shardings", [{"x": {"x": 0}}, {"x": {"x": 1}}, {"y": {"x": 0}}], ids=str)
def test_views_are_the_memory_that_they_alias(func, shardings):
    mod = calling(func, "double")
    (x,) = operands(mod)
    for mesh in ({"x": 2}, {"x": 3}):
        torch.testing.assert_close(mt.distribute_module(mod, mesh, shardings)(x), 2 * x)
    torch.testing.assert_close(mt.run_sequential(mod, [x]), 2 * x)


@pytest.mark.parametrize(
    ("func", "facts"),
    [
        (a_part_of_a_buffer, ["buffer 'row' (6) float32 is a part of another buffer (match_buffer)", "kernel 'f'"]),
        (
            halves_of_elements,
            ["2 problems:", "buffer 'source' (96) uint16 is a view of 'A'", "buffer 'target' (96) uint16", "'f'"],
        ),
    ],
)
def test_what_is_no_view_element_by_element_is_refused(func, facts):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(calling(func, "f"), {"x": 2}, {"x": {"x": 0}})
    for fact in (*facts, "binding: main.y"):
        assert fact in str(error.value)
