"""localize: the Relax module that one device runs: tiles, and collectives as calls of registered functions.

Functions of the module stay functions: one for each way in which its calls were laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import tvm
from tvm import ir, relax, tirx

from mesh_tensor.lowering.local_calls import inputs_of, outputs_of, packed, scopes_of
from mesh_tensor.lowering.tile_calls import TileCall, TileCalls
from mesh_tensor.plan.explicit import ExplicitGraph, Form, Run, Step, forms_in
from mesh_tensor.plan.ir import Scope

from .kernel_calls import KernelCalls
from .kernel_steps import is_kernel

Numbered = list[tuple[int, Step]]


def localize(explicit: ExplicitGraph, calls: TileCalls) -> ir.IRModule:
    """The local view of a module's function. It prints and parses as TVMScript."""
    return _Localizer(explicit, calls).module()


class _Localizer:
    def __init__(self, explicit: ExplicitGraph, calls: TileCalls) -> None:
        self._explicit, self._atoms, self._calls = explicit, explicit.atoms, calls
        self._builder = relax.BlockBuilder()
        self._functions: dict[ir.GlobalVar, relax.Function | tirx.PrimFunc] = {}
        self._by_hash: dict[tuple[str, int], list[ir.GlobalVar]] = {}
        self._constants = {form: form.value.data for form in explicit.constants}
        self._last_use = _last_uses(explicit)

    def module(self) -> ir.IRModule:
        """The function, and those that it calls."""
        name = self._explicit.graph.name
        steps = list(enumerate(self._explicit.steps))
        main = self._function(self._explicit.params, steps, self._explicit.result, depth=0)
        main = main.with_attr("global_symbol", name)
        functions = {var: _named(var.name_hint, function) for var, function in self._functions.items()}
        return ir.IRModule({**functions, ir.GlobalVar(name): main})

    def _function(self, params: Sequence[Form], steps: Numbered, result: Any, depth: int) -> relax.Function:
        """A function on tiles that runs `steps` and gives the tree of forms `result`."""
        variables = [relax.Var(form.name, self._calls.info(form)) for form in params]
        env: dict[Form, relax.Expr] = {**self._constants, **dict(zip(params, variables, strict=True))}
        builder = self._builder
        inner = [(scope, list(group)) for scope, group in groupby(steps, lambda item: _scope_at(item[1], depth))]
        calls = {id(group): self._callee(scope, group, depth + 1) for scope, group in inner if scope is not None}
        builder._begin_dataflow_block()
        for scope, group in inner:
            if scope is None:
                for _, step in group:
                    self._emit(step, env)
            else:
                self._call(*calls[id(group)], env)
        output = builder.emit_output(_tree(result, env))
        block = builder._end_block()
        return builder.normalize(relax.Function(variables, relax.SeqExpr([block], output), output.struct_info))

    def _emit(self, step: Step, env: dict[Form, relax.Expr]) -> None:
        """Bind the step's results."""
        outputs = outputs_of(step)
        if isinstance(step, Run) and is_kernel(step):
            calls = KernelCalls(step, self._atoms, self._builder, self._unique, partial(self._coordinates, env))
            env.update(zip(outputs, calls.emit([env[form] for form in step.inputs]), strict=True))
            return
        tiles = [env[form] for form in inputs_of(step)]
        *inner, last = self._calls.of(step)
        for call in inner:
            tiles.append(self._bound(call, tiles, "lv"))
        self._bind(self._bound(last, tiles, outputs[0].name), outputs, env)

    def _bound(self, call: TileCall, tiles: list[relax.Expr], name: str) -> relax.Var:
        """A variable for the call. Nothing is left to infer: BlockBuilder.emit would take several times as long."""
        var = relax.DataflowVar(self._builder.get_unique_name(name), call.info)
        self._builder.emit_normalized(relax.VarBinding(var, call.on(tiles)))
        return var

    def _coordinates(self, env: dict[Any, Any]) -> dict[str, tirx.Var]:
        """Where the device stands on each axis: known in each function from where it is asked for first."""
        mesh = self._explicit.graph.mesh
        if "coordinates" not in env:
            call = packed("mesh.coordinates", [relax.StringImm(", ".join(mesh))], relax.ShapeStructInfo(ndim=len(mesh)))
            axes = {axis: tirx.Var(axis, "int64") for axis in mesh}
            self._builder.match_cast(self._builder.emit(call), relax.ShapeStructInfo(list(axes.values())))
            env["coordinates"] = axes
        return env["coordinates"]

    def _bind(self, var: relax.Var, outputs: Sequence[Form], env: dict[Form, relax.Expr]) -> None:
        if isinstance(var.struct_info, relax.TupleStructInfo):
            for index, form in enumerate(outputs):
                env[form] = self._builder.emit(relax.TupleGetItem(var, index), form.name)
        else:
            env[outputs[0]] = var

    def _callee(self, scope: Scope, group: Numbered, depth: int) -> tuple[ir.GlobalVar, list[Form], list[Form]]:
        """The function of one call, with the forms that go in and those that come out."""
        made = dict.fromkeys(form for _, step in group for form in outputs_of(step))
        taken = dict.fromkeys(form for _, step in group for form in inputs_of(step))
        params = [form for form in taken if form not in made and form not in self._constants]
        last = group[-1][0]
        results = [form for form in made if self._last_use.get(form, -1) > last]
        results = results or list(made)[-1:]  # of nothing: TVM does not parse an empty tuple
        function = self._function(params, group, tuple(results), depth)
        return self._unique(scope.function, function), params, results

    def _call(self, callee: ir.GlobalVar, params: list[Form], results: list[Form], env: dict) -> None:
        call = relax.Call(callee, [env[form] for form in params])
        var = self._builder.emit(call, f"{callee.name_hint}_result")
        self._bind(var, results, env)

    def _unique(self, name: str, function: relax.Function | tirx.PrimFunc) -> ir.GlobalVar:
        """The function of the module that is this one, or a new one."""
        same = self._by_hash.setdefault((name, tvm.ir.structural_hash(function)), [])
        for var in same:
            if tvm.ir.structural_equal(self._functions[var], function):
                return var
        count = sum(len(found) for (base, _), found in self._by_hash.items() if base == name)
        var = ir.GlobalVar(name if count == 0 else f"{name}_{count}")
        relax.expr._update_struct_info(var, function.struct_info)
        self._functions[var] = function
        same.append(var)
        return var


def _named(name: str, function: relax.Function | tirx.PrimFunc) -> relax.Function | tirx.PrimFunc:
    """A kernel is known by the name that it has in the module; the module's own functions are private."""
    return function.with_attr("global_symbol", name) if isinstance(function, tirx.PrimFunc) else function


def _last_uses(explicit: ExplicitGraph) -> dict[Form, int]:
    last = {form: i for i, step in enumerate(explicit.steps) for form in inputs_of(step)}
    return last | dict.fromkeys(forms_in(explicit.result), len(explicit.steps))


def _tree(tree: Any, env: dict[Form, relax.Expr]) -> relax.Expr:
    """A tree of forms as an expression; a tuple of one is a tuple."""
    return env[tree] if isinstance(tree, Form) else relax.Tuple([_tree(item, env) for item in tree])


def _scope_at(step: Step, depth: int) -> Scope | None:
    scopes = scopes_of(step)
    return scopes[depth] if len(scopes) > depth else None
