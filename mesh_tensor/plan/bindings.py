"""Bindings: the nodes of one function's bindings, an expression at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import ir, relax

from mesh_tensor.annotations.manual import experts_of, is_manual
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import (
    OpCall,
    op_call,
    op_name,
    tensor_infos,
    tensor_types,
    with_known_sizes,
    with_said_sizes,
)
from mesh_tensor.rules.operator.elementwise import divides_integers
from mesh_tensor.rules.operator.index import looked_up

from .ir import Scopes, Tree, Value, leaves, map_tree
from .manual import ManualReader, Region, is_collective

if TYPE_CHECKING:
    from .reader import GraphReader


class Bindings:
    """One function's bindings, where variables are the values of `env`."""

    def __init__(
        self, reader: GraphReader, function: str, env: dict[relax.Var, Tree], scopes: Scopes, region: Region | None
    ) -> None:
        self._reader, self._function, self.env, self._scopes = reader, function, env, scopes
        self._region = region

    def expression(self, expr: relax.Expr, name: str = "result") -> Tree:
        """What an expression is; its operators become nodes."""
        read = _READ.get(type(expr))
        if read is not None:
            return read(self, expr, name)
        return refuse(
            f"{type(expr).__name__} can't be distributed",
            where=f"{self._function}.{name} = {expr}",
            fix="use operators, call_tir, calls of the module's functions, tuples and If",
        )

    def variable(self, expr: relax.Var, name: str) -> Tree:
        """What is bound to it."""
        return self.env[expr]

    def constant(self, expr: relax.Constant, name: str) -> Tree:
        """The value of a constant, the same at all its uses."""
        return self._reader.constant(expr)

    def fields(self, expr: relax.Tuple, name: str) -> Tree:
        """Its fields."""
        return tuple(self.expression(field, name) for field in expr.fields)

    def field(self, expr: relax.TupleGetItem, name: str) -> Tree:
        """The field of a tuple."""
        tree = self.expression(expr.tuple_value, name)
        assert isinstance(tree, tuple)
        return tree[expr.index]

    def sequence(self, expr: relax.SeqExpr, name: str) -> Tree:
        """What it ends with, after its bindings."""
        bindings = [binding for block in expr.blocks[:] for binding in block.bindings[:]]
        casts = {b.value: b.struct_info for b in bindings if isinstance(b, relax.MatchCast)}
        for binding in bindings:
            self.bind(binding, casts.get(binding.var, casts.get(binding.value)) if casts else None)
        return self.expression(expr.body, name)

    def bind(self, binding: relax.Binding, cast: relax.StructInfo | None = None) -> None:
        """Read a binding; `cast`: the type that the module says its value has."""
        self.env[binding.var] = self.expression(with_said_sizes(binding.value, cast), binding.var.name_hint)
        if isinstance(binding, relax.MatchCast):
            self._check_cast(binding)

    def _check_cast(self, binding: relax.MatchCast) -> None:
        """Sizes are known: a value is what it is said to be, and the cast only gives a name."""
        name = binding.var.name_hint
        wanted, found = tensor_types(binding.struct_info, name), tuple(v.type for v in leaves(self.env[binding.var]))
        if wanted != found:
            texts = [", ".join(f"{list(one.shape)} {one.dtype}" for one in types) for types in (found, wanted)]
            refuse(
                f"{name!r} is {texts[0]}, but the module says it is {texts[1]}",
                where=f"{self._function}.{name}",
                why="a size lies outside of what the module was made for",
                fix="call it with sizes that it can take",
            )

    def call(self, expr: relax.Call, name: str) -> Tree:
        """The results of an operator, which becomes a node, or of a function's."""
        if not isinstance(expr.op, ir.Op):
            return self._function_call(expr.op, expr.args[:], name)
        if isinstance(expr.struct_info, relax.ShapeStructInfo) and expr.struct_info.values is not None:
            return ()  # a shape of known sizes: who takes it has them from its type
        if is_collective(expr) and (self._reader.experts or not is_manual(expr) or experts_of(expr) is None):
            reader = ManualReader(self._reader, self._function, self._scopes, self._region, self.expression)
            return reader.read(expr, name)
        expr, called = with_known_sizes(expr, f"{self._function}.{name}"), op_name(expr.op)
        if isinstance(expr, relax.Constant):
            return self._reader.constant(expr)
        args, info = expr.args[:], expr.struct_info
        inputs = self._operands(args, name)
        call = OpCall(called, expr, tuple([operand.type for operand in inputs]), tensor_types(info, called))
        inputs = self._in_branch(call, inputs, name)
        kernel = self._reader.kernel(args[0]) if called == "call_tir" else None
        outputs = self._reader.add(call, inputs, self._function, name, self._scopes, kernel)
        return tuple(outputs) if isinstance(info, relax.TupleStructInfo) else outputs[0]

    def _function_call(self, op: relax.Expr, args: list[relax.Expr], name: str) -> Tree:
        if not isinstance(op, ir.GlobalVar):
            refuse(
                f"a call of {op} can't be distributed",
                where=f"{self._function}.{name}",
                fix="call operators and functions of the module by name",
            )
        return self._reader.enter(
            op.name_hint, [self.expression(arg, name) for arg in args], self._scopes, self._region
        )

    def _operands(self, args: list[relax.Expr], name: str) -> list[Value]:
        """The tensors among a call's arguments; a variable of the module's always has some."""
        found: list[Value] = []
        for arg in args:
            if isinstance(arg, relax.Var):
                found += leaves(self.env[arg])
            elif tensor_infos(arg.struct_info):
                found += leaves(self.expression(arg, name))
        return found

    def shape(self, expr: relax.ShapeExpr, name: str) -> Tree:
        """Nothing: who takes it has the sizes from its type."""
        return ()

    def branches(self, expr: relax.If, name: str) -> Tree:
        """Both branches are computed (Relax is pure), then one is taken."""
        cond = self.expression(expr.cond, name)
        assert isinstance(cond, Value)
        if cond.type != TensorType((), "bool"):
            refuse(
                f"what chooses between branches is {cond!r}, no bool without dims",
                where=f"{self._function}.{name}",
                fix="reduce it to one bool: R.any, R.all, or R.reshape to ()",
            )
        fails = self._add(relax.op.logical_not(cond.variable()), [cond], name)
        then = self._branch(expr.true_branch, cond, fails, name)
        other = self._branch(expr.false_branch, fails, cond, name)
        return self._select(cond, then, other, name)

    def _branch(self, expr: relax.Expr, taken: Value, not_taken: Value, name: str) -> Tree:
        """What a branch gives. Where it is not taken, nothing of it shows: gradients don't go through it (a derivative
        may be infinite there), loops in it have no steps, and no element of it is refused."""
        outer = self._reader.taken

        def cut(value: Value) -> Value:
            if "float" not in value.type.dtype:
                return value
            same = self._add(relax.op.grad.no_grad(value.variable()), [value], value.name)
            return self._where(not_taken, same, value, value.name)

        given = {var: map_tree(self.env[var], cut) for var in relax.analysis.free_vars(expr)}
        inner = Bindings(self._reader, self._function, self.env | given, self._scopes, self._region)
        self._reader.taken = taken if outer is None else self._and(outer, taken, name)
        try:
            return inner.expression(expr, name)
        finally:
            self._reader.taken = outer

    def _in_branch(self, call: OpCall, inputs: list[Value], name: str) -> list[Value]:
        """The operands, such that the operator has a result in a branch that is not taken, too: 0 is looked up, and
        integers are divided by 1."""
        taken, divides = self._reader.taken, divides_integers(call)
        if taken is None:
            return inputs
        guarded, instead = (1,) if divides else looked_up(call), int(divides)

        def checked(value: Value) -> Value:
            other = self._reader.constant(relax.const(instead, value.type.dtype))
            return self._where(taken, value, other, name)

        return [checked(v) if n in guarded and v.data is None else v for n, v in enumerate(inputs)]

    def _select(self, cond: Value, then: Tree, other: Tree, name: str) -> Tree:
        if isinstance(then, tuple) and isinstance(other, tuple):
            return tuple(self._select(cond, a, b, name) for a, b in zip(then, other, strict=True))
        assert isinstance(then, Value)
        assert isinstance(other, Value)
        if then.type != other.type:
            types = [f"{list(value.type.shape)} {value.type.dtype}" for value in (then, other)]
            refuse(
                f"one branch gives {types[0]}, the other one {types[1]}",
                where=f"{self._function}.{name}",
                why="both are computed, and one is taken: results have one shape and one dtype",
                fix="give tensors of one shape and dtype in both",
            )
        made = self._where(cond, then, other, name)
        self._reader.note(self._function, name, made)
        return made

    def _where(self, cond: Value, then: Value, other: Value, name: str) -> Value:
        operands = [cond, then, other]
        return self._add(relax.op.where(*[value.variable() for value in operands]), operands, name)

    def _and(self, one: Value, other: Value, name: str) -> Value:
        return self._add(relax.op.logical_and(one.variable(), other.variable()), [one, other], name)

    def _add(self, expr: relax.Expr, operands: list[Value], name: str) -> Value:
        """The result of an operator that the module does not have."""
        call = op_call(relax.BlockBuilder().normalize(expr))
        (made,) = self._reader.add(call, operands, self._function, name, self._scopes, note=False)
        return made


# By kind of expression: how it is read, given the name of what it is bound to.
_READ: dict[type, Callable[[Bindings, relax.Expr, str], Tree]] = {
    relax.SeqExpr: Bindings.sequence,
    relax.Var: Bindings.variable,
    relax.DataflowVar: Bindings.variable,
    relax.Constant: Bindings.constant,
    relax.Tuple: Bindings.fields,
    relax.TupleGetItem: Bindings.field,
    relax.If: Bindings.branches,
    relax.ShapeExpr: Bindings.shape,
    relax.Call: Bindings.call,
}
