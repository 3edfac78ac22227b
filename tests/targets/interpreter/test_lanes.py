"""Running a nest's iterations at once must give what running them in order gives: on random nests."""

import numpy as np
import pytest
import tilelang  # noqa: F401  (it brings the tvm that the next lines import)
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from mesh_tensor.targets.interpreter import interpret, run, statements

KINDS = (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL, tirx.ForKind.UNROLLED)
SIZE = 48


def const(value):
    return tirx.IntImm("int32", value)


class Nest:
    """Draws a random loop nest over two 1-D and one 2-D buffer of int32."""

    def __init__(self, draw):
        self.draw = draw
        self.buffers = [tirx.decl_buffer((SIZE,), "int32", name) for name in "XY"]
        self.buffers.append(tirx.decl_buffer((SIZE, SIZE), "int32", "Z"))
        self.names = 0

    def func(self):
        params = [tirx.Var(f"{b.name}_handle", "handle") for b in self.buffers]
        body = self.loop([], depth=3)
        return tirx.PrimFunc(params, body, buffer_map=dict(zip(params, self.buffers, strict=True)))

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def name(self, prefix):
        self.names += 1
        return f"{prefix}{self.names}"

    def index(self, loop_vars):
        """Within the buffers for every nest drawn here: at most three loops to 6 of coefficients to 2, around 24."""
        expr = const(self.draw(st.integers(22, 26)))
        for var in loop_vars[-3:]:
            scale = self.pick(0, 0, 1, 1, 1, -1, 2)
            if scale:
                expr = expr + var * const(scale)
        return expr

    def access(self, loop_vars):
        buffer = self.pick(*self.buffers)
        indices = [self.index(loop_vars) for _ in buffer.shape]
        if len(indices) == 1 and self.pick(*[False] * 4, True):
            return buffer, [tirx.floormod(indices[0], const(self.pick(3, 5)))]
        return buffer, indices

    def value(self, loop_vars, depth=2):
        kind = self.pick("load", "load", "const", "var", *(["add", "mul", "select", "min"] if depth else []))
        if kind == "load":
            return tirx.BufferLoad(*self.access(loop_vars))
        if kind == "const" or (kind == "var" and not loop_vars):
            return const(self.draw(st.integers(-3, 3)))
        if kind == "var":
            return self.pick(*loop_vars)
        a, b = self.value(loop_vars, depth - 1), self.value(loop_vars, depth - 1)
        if kind == "select":
            return tirx.if_then_else(self.condition(loop_vars), a, b)
        return {"add": tirx.Add, "mul": tirx.Mul, "min": tirx.Min}[kind](a, b)

    def condition(self, loop_vars):
        return self.pick(tirx.LT, tirx.GE, tirx.NE)(self.value(loop_vars, 0), self.value(loop_vars, 0))

    def statement(self, loop_vars, depth):
        kind = self.pick("store", "store", "update", "if", *(["loop", "loop"] if depth else []))
        if kind == "loop":
            return self.loop(loop_vars, depth)
        if kind == "if":
            other = self.statement(loop_vars, 0) if self.pick(True, False) else None
            return tirx.IfThenElse(self.condition(loop_vars), self.statement(loop_vars, depth and depth - 1), other)
        buffer, indices = self.access(loop_vars)
        value = self.value(loop_vars)
        if kind == "update":
            value = tirx.BufferLoad(buffer, indices) + value
        return tirx.BufferStore(buffer, value, indices)

    def body(self, loop_vars, depth):
        stmts = [self.statement(loop_vars, depth) for _ in range(self.draw(st.integers(1, 2)))]
        if self.pick(False, False, True):
            var = tirx.Var(self.name("b"), "int32")
            bind = tirx.Bind(var, self.value(loop_vars, 1))
            stmts = [bind, tirx.BufferStore(*self._store_of(var, loop_vars)), *stmts]
        return tirx.SeqStmt(stmts) if len(stmts) > 1 else stmts[0]

    def _store_of(self, var, loop_vars):
        buffer, indices = self.access(loop_vars)
        return buffer, var + self.value(loop_vars, 0), indices

    def loop(self, loop_vars, depth):
        var = tirx.Var(self.name("i"), "int32")
        low, extent = const(self.pick(0, 0, 1)), const(self.pick(1, 2, 3, 4))
        if loop_vars and self.pick(*[False] * 5, True):
            extent = self.pick(*loop_vars)
        return tirx.For(var, low, extent, self.pick(*KINDS), self.body([*loop_vars, var], depth - 1))


@st.composite
def nests(draw):
    return Nest(draw).func()


def results(func, in_order):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-4, 4, tuple(int(n) for n in func.buffer_map[p].shape), np.int32) for p in func.params]
    with pytest.MonkeyPatch.context() as patch:
        if in_order:
            patch.setattr(statements, "lanes_of", lambda loop: {})
        run._compiled.cache_clear()
        interpret(func, arrays)
    run._compiled.cache_clear()
    return arrays


@given(nests())
def test_lanes_change_nothing(func):
    for name, lanes, in_order in zip("XYZ", results(func, False), results(func, True), strict=True):
        np.testing.assert_array_equal(lanes, in_order, err_msg=f"{name} after\n{func}")
