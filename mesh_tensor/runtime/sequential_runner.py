"""What a function of a Relax module computes on one device: its bindings, one after the other, with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tvm_ffi
from tvm import ir, relax, tirx

from mesh_tensor.annotations.comm import Comm, comm_of
from mesh_tensor.annotations.manual import Manual, is_manual, manual_text
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.plan.loops import Recursion, recursion_of
from mesh_tensor.plan.manual import axes_in
from mesh_tensor.rules.operator.call import SIZED_BY_DATA, OpCall, op_call, plain, tensor_infos, with_known_sizes
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype, torch_tensor
from mesh_tensor.targets.kernels import tir_function
from mesh_tensor.targets.torch_ops import typed, untyped_function
from mesh_tensor.tir.plain_statements import with_contiguous_rows, with_places_from_the_end

from .each_device import EachDevice, chosen, collective, index, of_all, of_each, on_each, same_on_all, tiles, whole
from .module_inputs import bound
from .sequential_lines import Recorder

RelaxValue = Any  # a tensor, a tuple of values, or what a shape, a number or a string is in Relax
_NOT_RUN = {
    "call_dps_packed": "packed functions are not known here",
    "call_tir_inplace": "it overwrites its operands",
    "call_py_func": "Python functions are not known here",
    "make_closure": "closures are not supported",
    "invoke_closure": "closures are not supported",
    "invoke_pure_closure": "closures are not supported",
}
NOT_TORCH = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, ZeroDivisionError)


def as_tensor(value: Any) -> Any:
    """An array, of numpy or TVM, as a torch tensor; else the value itself."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value) if value.ndim else value)
    return torch_tensor(value) if isinstance(value, tvm_ffi.Tensor) else value


class Runner:
    """Runs the functions of one module."""

    def __init__(self, mod: ir.IRModule, device: torch.device, recorder: Recorder) -> None:
        self.mod, self.device, self.recorder = mod, device, recorder
        self.constants: dict[relax.Constant, torch.Tensor] = {}
        self._sized: dict[tuple[Any, ...], relax.Function] = {}
        self._recursions: dict[relax.Function, Recursion | None] = {}

    def call(self, function: str, args: Sequence[RelaxValue], axes: Mesh | None = None) -> RelaxValue:
        """The result of a Relax function of the module; in a manual computation over these axes, if there is one."""
        while True:  # step after step: Python has room for few calls within calls
            func = self._with_sizes(function, args)
            if func not in self._recursions:
                self._recursions[func] = recursion_of(function, func)
            frame = _Frame(self, function, dict(zip(func.params, args, strict=True)), axes)
            if (found := self._recursions[func]) is None:
                return frame.run(func.body)
            self.recorder.depends_on_data()
            frame.bind(found.head)
            if same_on_all(frame.run(found.condition), function) is not found.goes_on:
                return frame.run(found.ending)
            frame.bind(found.body)
            args = [frame.run(expr) for expr in found.again]

    def constant(self, constant: relax.Constant) -> torch.Tensor:
        """A constant's tensor."""
        if constant not in self.constants:
            self.constants[constant] = self.recorder.constant(as_tensor(constant.data).to(self.device))
        return self.constants[constant]

    def _with_sizes(self, function: str, args: Sequence[RelaxValue]) -> relax.Function:
        """The function with the sizes that its arguments bring in place of its symbols."""
        key = (function, *(tuple(a.shape) if isinstance(a, (torch.Tensor, EachDevice)) else None for a in args))
        if key not in self._sized:
            sizes: dict[tirx.Var, int] = {}
            for param, arg in zip(self.mod[function].params, args, strict=True):
                for info, tensor in zip(tensor_infos(param.struct_info), _leaves(arg), strict=True):
                    shape = info.tensor_sinfo.shape if hasattr(info, "tensor_sinfo") else info.shape
                    for size, actual in zip(shape or (), tensor.shape, strict=False):
                        if isinstance(size, tirx.Var):
                            sizes.setdefault(size, actual)
            self._sized[key] = bound(self.mod, function, sizes)[function]
        return self._sized[key]


class _Frame:
    """One call of a Relax function: its variables' values, kept until their last use."""

    def __init__(self, runner: Runner, function: str, values: dict[relax.Var, RelaxValue], axes: Mesh | None) -> None:
        self._runner, self._function, self._values, self._axes = runner, function, values, axes
        self._ends_here = set(values)  # what the next sequence may drop: its own variables and, the first one, these
        self._sizes: dict[tirx.Var, int] = {}  # of the symbols that R.match_cast makes

    def run(self, expr: relax.Expr, name: str = "result") -> RelaxValue:
        """The value of an expression that is bound to `name`."""
        for kind, evaluate in self._KINDS.items():
            if isinstance(expr, kind):
                return evaluate(self, expr, name)
        return self._refuse(name, f"{type(expr).__name__} can't be run", "closures and the like are not supported")

    def bind(self, bindings: Sequence[relax.Binding]) -> None:
        """Run bindings; what they make is kept, and what there was."""
        self._ends_here = set()
        for binding in bindings:
            self._bind(binding)

    def _bind(self, binding: relax.Binding) -> None:
        value = self.run(binding.value, binding.var.name_hint)
        if isinstance(binding, relax.MatchCast):
            self._match(binding.var.name_hint, value, binding.struct_info)
        self._values[binding.var] = value

    def _sequence(self, expr: relax.SeqExpr, _: str) -> RelaxValue:
        bindings = [binding for block in expr.blocks for binding in block.bindings]
        mine = self._ends_here | {binding.var for binding in bindings}
        self._ends_here = set()
        for binding, finished in zip(bindings, _last_uses(bindings, expr.body), strict=True):
            self._bind(binding)
            for var in mine.intersection(finished):
                self._values.pop(var, None)
        return self.run(expr.body)

    def _match(self, name: str, value: RelaxValue, info: relax.StructInfo) -> None:
        """R.match_cast: the value has to be what it is said to be."""
        for wanted, tensor in zip(tensor_infos(info), _leaves(value), strict=True):
            sizes = plain(wanted.shape) if isinstance(wanted.shape, relax.ShapeExpr) else None
            wrong = wanted.ndim not in (-1, tensor.ndim) or (wanted.dtype and torch_dtype(wanted.dtype) != tensor.dtype)
            for size, actual in () if wrong else zip(sizes or (), tensor.shape, strict=True):
                size = self._sizes.setdefault(size, actual) if isinstance(size, tirx.Var) else size
                wrong = wrong or (isinstance(size, int) and size != actual)
            if wrong:
                self._refuse(name, f"R.match_cast to {wanted} of a {tuple(tensor.shape)} {tensor.dtype}")

    def _if(self, expr: relax.If, name: str) -> RelaxValue:
        self._runner.recorder.depends_on_data()
        cond = self.run(expr.cond, name)
        if isinstance(cond, EachDevice):
            branches = [self.run(branch, name) for branch in (expr.true_branch, expr.false_branch)]
            return chosen(cond, *branches)
        return self.run(expr.true_branch if bool(cond) else expr.false_branch, name)

    def _call(self, expr: relax.Call, name: str) -> RelaxValue:
        if isinstance(expr.op, ir.GlobalVar):
            return self._runner.call(expr.op.name_hint, [self.run(arg, name) for arg in expr.args], self._axes)
        if not isinstance(expr.op, ir.Op):
            self._refuse(name, f"a call of {expr.op}", "closures and local functions are not supported")
        if is_manual(expr):
            return self._manual(expr, name)
        op = expr.op.name.removeprefix("relax.")
        if (make := _EDGES.get(_packed(expr))) is not None:
            self._runner.recorder.depends_on_data()
            return make(self.run(expr.args[1], name), Mesh(axes_in(expr)))
        if self._axes is not None and (comm := comm_of(_packed(expr) or op, expr, self._axes, outer=False)):
            return self._collective(comm, expr, name)
        if op in _NOT_RUN:
            self._refuse(name, f"R.{op} can't be run", _NOT_RUN[op])
        if op == "assert_op":
            return self._assert(expr, name)
        if op == "print" or not tensor_infos(expr.struct_info):
            return expr.struct_info  # a shape or a number: what is known of it is in its type
        return self._operator(expr, op, name)

    def _operator(self, expr: relax.Call, op: str, name: str) -> RelaxValue:
        tensors = [
            leaf for arg in expr.args if tensor_infos(arg.struct_info) for leaf in _leaves(self.run(arg, name))
        ]  # fmt: skip
        try:
            if op in SIZED_BY_DATA:
                return self._sized_by_data(expr, op, tensors)
            expr = with_known_sizes(_sized(expr, self._sizes) if self._sizes else expr, f"{self._function}.{name}")
            if isinstance(expr, relax.Constant):
                return self._runner.constant(expr)
            call = op_call(expr)
            function = self._tir_function(call) if op == "call_tir" else untyped_function(call)
            results = on_each(typed(function, [torch_dtype(out.dtype) for out in call.outputs]), tensors)
        except MeshTensorError as error:
            raise MeshTensorError(f"{error}\n  binding: {self._function}.{name}") from None
        except NOT_TORCH as error:
            self._refuse(name, f"R.{op} failed: {error}", str(expr))
        found = [TensorType(tuple(r.shape), dtype_name(r.dtype)) for r in results]
        if found != list(call.outputs):
            self._refuse(name, f"R.{op} gave {found}, but its type says {list(call.outputs)}")
        self._runner.recorder.called(call, function, tensors, results)
        return _like(expr.struct_info, iter(results))

    def _sized_by_data(self, expr: relax.Call, op: str, tensors: Sequence[Any]) -> RelaxValue:
        """What the data says."""
        self._runner.recorder.depends_on_data()
        types = tuple([TensorType(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors])
        function = untyped_function(OpCall(op, expr, types, ()))

        def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = function(*operands)
            return made if isinstance(made, tuple) else (made,)

        results = on_each(run, tensors)
        return _like(expr.struct_info, iter(results))

    def _manual(self, expr: relax.Call, name: str) -> RelaxValue:
        self._runner.recorder.depends_on_data()
        where, args = f"binding {self._function}.{name}", [self.run(arg, name) for arg in expr.args[1:-1]]
        infos = tensor_infos(expr.struct_info)
        stated = Manual.parse(manual_text(expr), [len(a.shape) for a in args], [i.ndim for i in infos], where)
        outer = self._axes
        mesh = Mesh({**(outer.shape if outer is not None else {}), **stated.axes.shape})
        mine = [tiles(arg, layout, mesh, where) for arg, layout in zip(args, stated.inputs, strict=True)]
        made = _leaves(self._runner.call(stated.body, mine, mesh))
        ends = zip(made, stated.outputs, strict=True)
        return _like(expr.struct_info, iter([whole(one, layout, outer, where) for one, layout in ends]))

    def _collective(self, comm: Comm, expr: relax.Call, name: str) -> RelaxValue:
        assert self._axes is not None
        values = [self.run(arg, name) for arg in expr.args if tensor_infos(arg.struct_info)]
        comm.shape(values[0].shape if values else (), f"binding {self._function}.{name}")
        if comm.kind == "axis_index":
            return index(comm, self._axes, self._runner.device)
        return collective(comm, values[0], self._axes)

    def _tir_function(self, call: OpCall) -> Callable[..., tuple[torch.Tensor, ...]]:
        numbers = plain(call.expr.args[2]) if len(call.expr.args) > 2 else ()
        kernel = with_places_from_the_end(with_contiguous_rows(self._runner.mod[call.expr.args[0]]))
        return tir_function(kernel, call.inputs, call.outputs, numbers)

    def _assert(self, expr: relax.Call, name: str) -> RelaxValue:
        condition, *rest = expr.args
        self._runner.recorder.depends_on_data()
        holds = plain(condition) if isinstance(condition, relax.PrimValue) else self.run(condition, name)
        if not bool(holds):
            self._refuse(name, "R.assert_op failed", str(rest[0].value) if rest else "")
        return expr.struct_info

    def _refuse(self, name: str, what: str, why: str = "") -> Any:
        refuse(
            what,
            where=f"binding {self._function}.{name}",
            why=why,
            fix="write it with operators, R.call_tir, calls of the module's functions, tuples and If",
        )

    _KINDS: dict[type, Callable[[_Frame, Any, str], RelaxValue]] = {
        relax.SeqExpr: _sequence,
        relax.Var: lambda self, var, _: self._values[var],
        relax.Constant: lambda self, constant, _: self._runner.constant(constant),
        relax.Tuple: lambda self, tup, name: tuple(self.run(field, name) for field in tup.fields),
        relax.TupleGetItem: lambda self, get, name: self.run(get.tuple_value, name)[get.index],
        relax.If: _if,
        relax.Call: _call,
        relax.ShapeExpr: lambda self, shape, _: shape,
        relax.PrimValue: lambda self, number, _: number,
        relax.StringImm: lambda self, text, _: text,
        relax.DataTypeImm: lambda self, dtype, _: dtype,
    }


_EDGES: dict[str, Callable[[Any, Mesh], Any]] = {PER_DEVICE: of_each, ALL_DEVICES: of_all}


def _packed(expr: relax.Call) -> str:
    first = expr.args[0] if expr.args else None
    return str(first.global_symbol) if isinstance(first, relax.ExternFunc) else ""


def _last_uses(bindings: Sequence[relax.Binding], body: relax.Expr) -> list[list[relax.Var]]:
    """Per binding, the variables that nothing after it uses."""
    used = set(relax.analysis.all_vars(body))
    last: list[list[relax.Var]] = []
    for binding in reversed(bindings):
        here = dict.fromkeys([*relax.analysis.all_vars(binding.value), binding.var])
        last.append([var for var in here if var not in used])
        used.update(here)
    return last[::-1]


def _sized(expr: relax.Call, sizes: Mapping[tirx.Var, int]) -> relax.Call:
    """The call with sizes in place of symbols, in the types of its operands too."""
    free = relax.analysis.free_vars(expr)
    makes = relax.Var("sizes", relax.ShapeStructInfo(list(sizes)))
    builder = relax.BlockBuilder()
    with builder.function("sized", [*free, makes]):
        builder.emit_func_output(builder.emit(expr))
    func = builder.get()["sized"].bind_symbolic_vars(dict(sizes))
    return func.body.blocks[0].bindings[0].value


def _leaves(value: RelaxValue) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, (torch.Tensor, EachDevice)) else []


def _like(info: relax.StructInfo, results: Any) -> RelaxValue:
    """The results in the form of the type: tuples in tuples."""
    if isinstance(info, relax.TupleStructInfo):
        return tuple(_like(field, results) for field in info.fields)
    return next(results)
