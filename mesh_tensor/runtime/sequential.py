"""run_sequential: a Relax module on one device, operator by operator, with torch. The reference for everything else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import tvm_ffi
from tvm import ir, relax, tirx

from mesh_tensor.annotations.comm import Comm, comm_of
from mesh_tensor.annotations.manual import Manual, is_manual, manual_text
from mesh_tensor.annotations.names import check_module, flat_arguments, with_flat_parameters
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import MeshTensorError, listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import Recent
from mesh_tensor.plan.loops import Recursion, recursion_of
from mesh_tensor.rules.operator.call import SIZED_BY_DATA, OpCall, op_call, plain, tensor_infos, with_known_sizes
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype, torch_tensor
from mesh_tensor.targets.kernels import tir_function
from mesh_tensor.targets.torch_ops import typed, untyped_function

from .ambient import full_precision, undisturbed, why_not_plain
from .each_device import EachDevice, chosen, collective, index, on_each, same_on_all, tiles, whole
from .module_inputs import ModuleSignature, bound
from .sequential_lines import Recorded, Recorder, memory_of

RelaxValue = Any  # a tensor, a tuple of values, or what a shape, a number or a string is in Relax
_NOT_RUN = {
    "call_dps_packed": "packed functions are not known here",
    "call_tir_inplace": "it overwrites its operands",
    "call_py_func": "Python functions are not known here",
    "make_closure": "closures are not supported",
    "invoke_closure": "closures are not supported",
    "invoke_pure_closure": "closures are not supported",
}
_NOT_TORCH = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, ZeroDivisionError)
_FAILS = (MeshTensorError, *_NOT_TORCH)
_CALLS = 16  # of a module, for operands of other shapes, that are known


@undisturbed
def run_sequential(
    mod: ir.IRModule,
    inputs: Sequence[torch.Tensor | np.ndarray] | Mapping[str, torch.Tensor | np.ndarray],
    function: str = "main",
) -> Any:
    """Run a function of a Relax module on one device, as if no tensor were distributed: sharding annotations are
    ignored, `R.print` does nothing, TIR functions (TileLang kernels too) are interpreted.

    Args:
        mod: the module. Symbolic sizes take the values that the inputs bring.
        inputs: the function's arguments in order, or by parameter name. Parameters that the module brings along (the
            attribute "params" that frontends attach) can be left out.
        function: the function to run.

    Returns:
        The function's result: a tensor, or a tuple of results. None of them shares memory with an input.

    Raises:
        MeshTensorError: inputs that don't fit, all named; or an operator that has no torch function, whose attributes
            or operands are refused, or whose binding is a closure or packed call, named with its binding.

    >>> run_sequential(mod, {"x": torch.ones(2, 4), "w": torch.ones(4, 3)})
    """
    check_module(mod, "run_sequential")
    known = _KNOWN.get(mod)
    if known is None or not known.is_of(mod):
        known = _KNOWN[mod] = _Known(mod)
    return known.result(inputs, function)


class _Known:
    """What is known of a module: its functions' parameters, and what was recorded of calls of them."""

    def __init__(self, mod: ir.IRModule) -> None:
        self._mod, self._functions = mod.clone(), mod.functions
        self._taken: dict[str, tuple[ir.IRModule, relax.Function, ModuleSignature]] = {}
        self._recorded: Recent[tuple, Recorded] = Recent(_CALLS)

    def is_of(self, mod: ir.IRModule) -> bool:
        """Whether the module has the functions that it had: a map that somebody else has, too, is not written."""
        return self._functions.same_as(mod.functions)

    def result(self, inputs: Any, function: str) -> Any:
        """The result of a function of the module."""
        mod, func, signature = self._function(function)
        given = _arguments(func, signature, inputs)
        tensors = list(given.values())
        key = (function, *[(type(t), getattr(t, "shape", None), getattr(t, "dtype", None)) for t in tensors])
        recorded = self._recorded.get(key)
        if recorded is None or any(map(why_not_plain, tensors)):
            signature.check(given)
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        on_device = nullcontext() if device.type == "cpu" else device
        with torch.no_grad(), on_device, full_precision():
            if recorded is not None and recorded.device == device:
                with suppress(*_FAILS):  # interpreting it says where
                    return _apart(recorded(tensors), {*map(memory_of, tensors), *recorded.made_once})
            tensors = [tensor.detach() for tensor in tensors]
            runner = _Runner(mod, device, Recorder(tensors))
            result = runner.call(function, tensors)
            recorded = runner.recorder.recorded(result, device)
            if recorded is None:
                return _apart(result, {*map(memory_of, tensors), *map(memory_of, runner.constants.values())})
            self._recorded.put(key, recorded)
            return _apart(result, recorded.made_once)

    def _function(self, function: str) -> tuple[ir.IRModule, relax.Function, ModuleSignature]:
        """The module with flat parameters, the function, and its."""
        if function not in self._taken:
            known = [var.name_hint for var, func in self._mod.functions_items() if isinstance(func, relax.Function)]
            if function not in known:
                refuse(f"the module has no Relax function {function!r}", fix=f"it has {listing(known)}")
            mod = with_flat_parameters(self._mod, function)
            self._taken[function] = mod, mod[function], ModuleSignature(mod, function)
        return self._taken[function]


_KNOWN: WeakKeyDictionary[ir.IRModule, _Known] = WeakKeyDictionary()


def _apart(result: RelaxValue, known: Collection[int]) -> RelaxValue:
    """The result in memory that is none of what is known."""
    return _map(result, lambda tensor: tensor.clone() if memory_of(tensor) in known else tensor)


def _arguments(func: relax.Function, signature: ModuleSignature, inputs: Any) -> dict[str, torch.Tensor]:
    """The function's arguments by parameter, in order."""
    args, named = ((), inputs) if isinstance(inputs, Mapping) else (tuple(flat_arguments(inputs)), {})
    weights = {} if len(args or named) == len(signature.params) else _weights(func)
    kept = {name: value for name, value in weights.items() if name not in named}
    return {name: _tensor(value) for name, value in signature.bind(kept, args, named).items()}


def _weights(func: relax.Function) -> dict[str, Any]:
    """The last parameters' values, where a frontend has attached them."""
    values = func.attrs["params"] if func.attrs is not None and "params" in func.attrs else ()
    return {
        var.name_hint: value for var, value in zip(func.params[len(func.params) - len(values) :], values, strict=True)
    }


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value) if value.ndim else value)
    return torch_tensor(value) if isinstance(value, tvm_ffi.Tensor) else value


def _map(value: RelaxValue, change: Callable[[torch.Tensor], torch.Tensor]) -> RelaxValue:
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return change(value) if isinstance(value, torch.Tensor) else value


class _Runner:
    """Runs the functions of one module."""

    def __init__(self, mod: ir.IRModule, device: torch.device, recorder: Recorder) -> None:
        self.mod, self.device, self.recorder = mod, device, recorder
        self.constants: dict[relax.Constant, torch.Tensor] = {}
        self._sized: dict[tuple[Any, ...], relax.Function] = {}
        self._recursions: dict[relax.Function, Recursion | None] = {}

    def call(self, function: str, args: Sequence[RelaxValue], axes: Mesh | None = None) -> RelaxValue:
        """The result of a Relax function of the module; in a manual computation over these axes, if there is one."""
        func = self._with_sizes(function, args)
        if func not in self._recursions:
            self._recursions[func] = recursion_of(function, func)
        found = self._recursions[func]
        while found is not None:  # step after step: Python has room for few calls within calls
            self.recorder.depends_on_data()
            frame = _Frame(self, function, dict(zip(func.params, args, strict=True)), axes)
            frame.bind(found.head)
            if same_on_all(frame.run(found.condition), function) is not found.goes_on:
                return frame.run(found.ending)
            frame.bind(found.body)
            args = [frame.run(expr) for expr in found.again]
            func = self._with_sizes(function, args)
            if func not in self._recursions:
                self._recursions[func] = recursion_of(function, func)
            found = self._recursions[func]
        return _Frame(self, function, dict(zip(func.params, args, strict=True)), axes).run(func.body)

    def constant(self, constant: relax.Constant) -> torch.Tensor:
        """A constant's tensor."""
        if constant not in self.constants:
            self.constants[constant] = self.recorder.constant(_tensor(constant.data).to(self.device))
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

    def __init__(self, runner: _Runner, function: str, values: dict[relax.Var, RelaxValue], axes: Mesh | None) -> None:
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
            value = self.run(binding.value, binding.var.name_hint)
            if isinstance(binding, relax.MatchCast):
                self._match(binding.var.name_hint, value, binding.struct_info)
            self._values[binding.var] = value

    def _sequence(self, expr: relax.SeqExpr, _: str) -> RelaxValue:
        bindings = [binding for block in expr.blocks for binding in block.bindings]
        mine = self._ends_here | {binding.var for binding in bindings}
        self._ends_here = set()
        for binding, finished in zip(bindings, _last_uses(bindings, expr.body), strict=True):
            name = binding.var.name_hint
            value = self.run(binding.value, name)
            if isinstance(binding, relax.MatchCast):
                self._match(name, value, binding.struct_info)
            self._values[binding.var] = value
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
        except _NOT_TORCH as error:
            self._refuse(name, f"R.{op} failed: {error}", str(expr))
        found = [TensorType(tuple(r.shape), dtype_name(r.dtype)) for r in results]
        if found != list(call.outputs):
            self._refuse(name, f"R.{op} gave {found}, but its type says {list(call.outputs)}")
        self._runner.recorder.called(function, tensors, results)
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
        """A function on the tiles of every device."""
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
        """What devices have after a collective."""
        assert self._axes is not None
        values = [self.run(arg, name) for arg in expr.args if tensor_infos(arg.struct_info)]
        comm.shape(values[0].shape if values else (), f"binding {self._function}.{name}")
        if comm.kind == "axis_index":
            return index(comm, self._axes, self._runner.device)
        return collective(comm, values[0], self._axes)

    def _tir_function(self, call: OpCall) -> Callable[..., tuple[torch.Tensor, ...]]:
        numbers = plain(call.expr.args[2]) if len(call.expr.args) > 2 else ()
        return tir_function(self._runner.mod[call.expr.args[0]], call.inputs, call.outputs, numbers)

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
