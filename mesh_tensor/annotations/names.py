"""Names of the values of a Relax function. TVM lets several variables have one name; annotations go by names.
Parameters that are tuples become one parameter per field: layouts, weights and inputs are of tensors."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm import ir, relax

from mesh_tensor.base.errors import listing, refuse

from .annotation import from_attr
from .manual import body_of, is_manual

# A function attribute that an importer sets: the source's name of a parameter -> the module's.
SOURCE_NAMES_ATTR = "mesh_tensor_names"
_MANY = 24
# What torch's wrappers put into the names of a model's weights.
_WRAPPERS = {"_checkpoint_wrapped_module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod", "module"}
# What else people have in hand -> how a module is made of it.
_AS_MODULE = {
    "ImportedModule": "pass its `mod`, and its `params` as weights",
    "MeshModule": "pass the module that it was distributed from",
    "Pipeline": "pass the module that it was made of",
    "PrimFunc": "of a kernel: mt.compile(mt.annotate(kernel, mesh, shardings))",
    "TrainingRun": "pass the step that it was distributed from",
    "TrainingStep": "run it by mt.distribute_module; or pass a module that gives the loss",
    "function": "call it, if it makes a module or a kernel",
    "Function": "make a module of it: tvm.IRModule.from_expr(function)",
}


def check_module(mod: Any, caller: str, *, takes_imported: bool = False) -> None:
    """Refuse what is no IRModule, with how one is made of it. `takes_imported`: the caller takes what from_torch gives
    as well."""
    if not isinstance(mod, ir.IRModule):
        kind, part = type(mod).__name__, "" if takes_imported else ".mod"
        fix = _AS_MODULE.get(kind, "make one with @I.ir_module")
        if any(cls.__module__.startswith("torch.nn") for cls in type(mod).__mro__):
            fix = f"export and import it: mt.from_torch(torch.export.export(model, inputs)){part}"
        elif kind == "ExportedProgram":
            fix = f"import it: mt.from_torch(program){part}"
        refuse(f"{caller} takes an IRModule, not {type(mod).__name__}", fix=fix)


def source_names(func: relax.Function) -> dict[str, str]:
    """From the names that values had where the module comes from to theirs."""
    attr = (func.attrs or {}).get(SOURCE_NAMES_ATTR)
    return from_attr(attr) if attr is not None else {}


class SourceNames:
    """The names that values had where a module comes from, and what they are called now. What wrappers put into a name
    doesn't matter, nor "model." in front of it, unless that could mean several."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._plain: dict[str, set[str]] = {}
        for theirs, ours in names.items():
            self._plain.setdefault(_unwrapped(theirs), set()).add(ours)

    def ours(self, name: str) -> str:
        """The module's name for a name of elsewhere; a name that is none of these as it is."""
        if name in self.names:
            return self.names[name]
        found = self._plain.get(_unwrapped(name), ())
        return next(iter(found)) if len(found) == 1 else name


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("model.")


def relax_functions(mod: ir.IRModule) -> dict[str, relax.Function]:
    """The module's Relax functions by name."""
    return {var.name_hint: func for var, func in mod.functions_items() if isinstance(func, relax.Function)}


def relax_function(mod: ir.IRModule, name: str) -> relax.Function:
    """The Relax function of that name, or a MeshTensorError that names those that there are."""
    functions = relax_functions(mod)
    if name not in functions:
        which = f"name one that it has: function={', '.join(map(repr, functions))}"
        refuse(f"the module has no Relax function {name!r}", fix=which if functions else "give it one: @R.function")
    return functions[name]


def meant_function(mod: ir.IRModule, name: str) -> str:
    """The name, if the module has a Relax function of it; of a module without a "main" its only public one is meant."""
    functions = relax_functions(mod)
    public = [found for found, func in functions.items() if "global_symbol" in (func.attrs or {})]
    if name == "main" and name not in functions and len(public) == 1:
        return public[0]
    relax_function(mod, name)
    return name


def reachable(mod: ir.IRModule, name: str) -> dict[str, relax.Function]:
    """The function of that name and the Relax functions that it calls, directly or not."""
    functions, found, todo = relax_functions(mod), {name: relax_function(mod, name)}, [name]
    while todo and len(found) < len(functions):
        for binding in bindings(found[todo.pop()]):
            called = _callee(binding.value)
            if called in functions and called not in found:
                found[called] = functions[called]
                todo.append(called)
    return found


def _callee(value: relax.Expr) -> str:
    """The function that an expression calls, if it does."""
    if is_manual(value):
        return body_of(value)
    is_call = isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar)
    return str(value.op.name_hint) if is_call else ""


def bindings(func: relax.Function) -> list[relax.Binding]:
    """All bindings of a function in order, those in branches before the one that takes the branch's result."""
    return list(_bindings(func.body))


def variables(func: relax.Function) -> list[relax.Var]:
    """The parameters, then what the bindings bind, in order."""
    return [*func.params[:], *(binding.var for binding in bindings(func))]


def known(wanted: str, names: Sequence[str]) -> str:
    """Names for a message about a wanted one that does not exist: all of them, or those that are most like it."""
    if len(names) <= _MANY:
        return listing(names)
    close = difflib.get_close_matches(wanted, names, n=5, cutoff=0.4) or list(names[:5])
    return f"{listing(close)} and {len(names) - len(close)} more"


def unique_names(mod: ir.IRModule) -> ir.IRModule:
    """The same module, in which no two variables of a Relax function have the same name: a name that was there before
    is numbered, as TVMScript prints it."""
    changed = None
    for name, func in relax_functions(mod).items():
        names = [var.name_hint for var in variables(func)]
        if len(set(names)) < len(names):
            changed = changed or mod.clone()
            changed.update_func(changed.get_global_var(name), _Renamer(mod, func).renamed())
    return changed or mod


def renamed_parameters(mod: ir.IRModule, func: relax.Function, names: Mapping[str, str]) -> relax.Function:
    """The function of `mod` with parameters renamed; what else has one of the new names gets another one."""
    return _Renamer(mod, func, names).renamed()


class Fresh:
    """Names that are not taken."""

    def __init__(self, taken: Sequence[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def name(self, wanted: str) -> str:
        """`wanted`, with a number if it is taken; it is taken then."""
        name, count = wanted, self._counts.get(wanted, 0)
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        self._counts[wanted] = count
        return name


@relax.expr_functor.mutator
class _Renamer(relax.PyExprMutator):
    def __init__(self, mod: ir.IRModule, func: relax.Function, names: Mapping[str, str] | None = None) -> None:
        super().__init__(mod)
        self._func, self._names = func, names or {}
        self._seen: set[str] = set()
        self._fresh = Fresh([*self._names.values(), *(var.name_hint for var in variables(func))])

    def renamed(self) -> relax.Function:
        func = self._func
        params = [self._parameter(param) for param in func.params]
        for old, new in zip(func.params, params, strict=True):
            self.set_var_remap(old.vid, new)
        return relax.Function(params, self.visit_expr(func.body), func.ret_struct_info, func.is_pure, func.attrs)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Bind the same value to a variable with a name of its own."""
        value = self.builder_.normalize(self.visit_expr(binding.value))
        self._emit(binding.var, lambda var: relax.VarBinding(var, value))

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """Bind the same cast to a variable with a name of its own."""
        value = self.visit_expr(binding.value)
        self._emit(binding.var, lambda var: relax.MatchCast(var, value, binding.struct_info))

    def _emit(self, old: relax.Var, make: Any) -> None:
        new = self._renamed(old)
        self.builder_.emit_normalized(make(new))
        self.set_var_remap(old.vid, new)

    def _parameter(self, var: relax.Var) -> relax.Var:
        name = self._names.get(var.name_hint)
        if name is None or name == var.name_hint:
            return self._renamed(var)
        self._seen.add(name)
        return relax.Var(name, var.struct_info)

    def _renamed(self, var: relax.Var) -> relax.Var:
        if var.name_hint not in self._seen:
            self._seen.add(var.name_hint)
            return var
        return type(var)(self._fresh.name(var.name_hint), var.struct_info)


def _bindings(expr: relax.Expr) -> Iterator[relax.Binding]:
    if not isinstance(expr, relax.SeqExpr):
        return
    for block in expr.blocks[:]:
        for binding in block.bindings[:]:  # a slice is a list: TVM's arrays take several times as long to iterate over
            value = binding.value
            if type(value) is relax.If:  # isinstance takes several times as long on TVM's classes
                yield from _bindings(value.true_branch)
                yield from _bindings(value.false_branch)
            yield binding


def without_layout(info: relax.StructInfo) -> relax.StructInfo:
    """A tensor's struct info without how it lies; any other as it is."""
    return info.tensor_sinfo if isinstance(info, relax.distributed.DTensorStructInfo) else info


def with_flat_parameters(mod: ir.IRModule, function: str) -> ir.IRModule:
    """The module, in which the parameters of `function` that are tuples are taken apart: `t` is `t_0`, `t_1`, ...
    Refused where there is no such function."""
    func = relax_function(mod, function)
    if not any(isinstance(param.struct_info, relax.TupleStructInfo) for param in func.params):
        return mod
    fresh = Fresh([var.name_hint for var in variables(func)])
    params: list[relax.Var] = []
    bound: list[relax.VarBinding] = []
    for param in func.params:
        fields, value = _taken_apart(param, fresh)
        params += fields
        if value is not param:
            bound.append(relax.VarBinding(param, value))
    body = relax.SeqExpr([relax.BindingBlock(bound), *func.body.blocks], func.body.body)
    body = relax.BlockBuilder().normalize(body)
    flat = relax.Function(params, body, func.ret_struct_info, func.is_pure, func.attrs)
    mod = mod.clone()
    mod.update_func(mod.get_global_var(function), flat)
    return mod


def flat_arguments(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments of a call, with those that are tuples or lists taken apart likewise."""
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from flat_arguments(arg)
        else:
            yield arg


def _taken_apart(param: relax.Var, fresh: Fresh) -> tuple[list[relax.Var], relax.Expr]:
    """A parameter for every tensor in the type of `param`, and what `param` is of them."""
    if not isinstance(param.struct_info, relax.TupleStructInfo):
        return [param], param
    made: list[relax.Var] = []
    values: list[relax.Expr] = []
    for index, info in enumerate(param.struct_info.fields):
        fields, value = _taken_apart(relax.Var(fresh.name(f"{param.name_hint}_{index}"), info), fresh)
        made += fields
        values.append(value)
    return made, relax.Tuple(values)
