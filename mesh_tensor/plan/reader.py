"""Reader: from a Relax function of known sizes to a Graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import ir, relax, tirx

from mesh_tensor.annotations.manual import experts_of, is_manual
from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.annotations.names import relax_functions
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import (
    OpCall,
    op_call,
    op_name,
    tensor_infos,
    tensor_type,
    tensor_types,
    with_known_sizes,
    with_said_sizes,
)

from .ir import ANNOTATE, STATE_ATTR, Graph, GraphLoop, Node, Scope, Tree, Value, leaves
from .loop_reader import LoopReader
from .loops import Recursion, recursion_of
from .manual import Devices, Region, is_collective
from .manual_reader import ManualReader
from .varying import Axes, node_axes

# (function name, variable name) -> what was stated for it
Annotations = Mapping[tuple[str, str], Annotation]


def read_graph(
    mod: ir.IRModule,
    function: str,
    mesh: Mesh,
    annotations: Annotations,
    *,
    loops: bool = False,
    experts: bool = True,
) -> Graph:
    """The Graph of a function of `mod`, with all calls of other Relax functions entered. `loops`: those that end by
    calling themselves are loops of the graph; else their steps are unrolled. `experts`: those of `mt.experts` are, too;
    else each is one node.

    Raises:
        MeshTensorError: the function is missing or recursive, a size is symbolic, or an expression is no operator,
            call, tuple or If.
    """
    reader = _Reader(mod, mesh, annotations, loops, experts)
    func = reader.function(function)
    params = [reader.parameter(function, var) for var in func.params[:]]
    body = reader.body(function, func, params, ())
    if own := {value.name: reader.varying[value] for value in leaves(body) if value in reader.varying}:
        refuse(
            [f"devices along {axis!r} may have different values of {name!r}" for name in own for axis, _ in own[name]],
            where=f"results of {function!r}",
            fix="reduce or gather them",
        )
    state, manual = _state(func, params, body), frozenset(reader.manual)
    graph = Graph(function, mesh, params, reader.nodes, body, reader.annotations, state, manual=manual)
    if reader.loops:
        graph.loops, graph.nodes = reader.loops, _taken(graph)
    _check_groups(graph)
    return graph


def _taken(graph: Graph) -> list[Node]:
    """The nodes without those whose results nothing takes: what rows of loops are put into is never made."""
    taken, kept = set(leaves(graph.result)), list[Node]()
    for node in reversed(graph.nodes):
        if node.mark or not taken.isdisjoint(node.outputs) or not graph.annotations.keys().isdisjoint(node.outputs):
            taken.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _check_groups(graph: Graph) -> None:
    """Values that are to lie alike can."""
    problems = []
    for name, members in graph.groups().items():
        stated = [graph.annotations[value] for value in members]
        said = {one.sharding for one in stated if not one.says_nothing}
        if len({value.type.shape for value in members}) > 1:
            problems.append(f"group {name!r} has values of several shapes: {listing(list(map(repr, members)))}")
        if len(said) > 1 or any(one.sharding.partial for one in stated):
            layouts = [f"{value.name} '{graph.annotations[value].sharding}'" for value in members]
            problems.append(f"values of group {name!r} are stated to lie differently, or partial: {listing(layouts)}")
    if problems:
        refuse(
            problems, where=f"module function {graph.name!r}", fix="state one layout per group, of values of one shape"
        )


def _state(func: relax.Function, params: list[Value], body: Tree) -> dict[Value, Value]:
    """Results that replace a parameter in the next call."""
    by_name = {param.name: param for param in params}
    attr = (func.attrs or {}).get(STATE_ATTR, {})
    return {leaves(body)[int(number)]: by_name[name] for name, number in attr.items()}


class _Reader:
    def __init__(self, mod: ir.IRModule, mesh: Mesh, annotations: Annotations, with_loops: bool, experts: bool) -> None:
        self.mesh, self.nodes = mesh, list[Node]()
        self.loops: dict[Scope, GraphLoop] = {}
        self.with_loops, self.experts = with_loops, experts
        self.varying: dict[Value, Axes] = {}
        self.manual: set[str] = set()  # axes
        self.annotations: dict[Value, Annotation] = {}
        self._mod, self._stated = mod, annotations
        self._functions = relax_functions(mod)
        self._names: dict[str, int] = {}
        self._constants: dict[relax.Constant, Value] = {}
        self._known_sizes: dict[tuple, relax.Function] = {}
        self._recursions: dict[relax.Function, Recursion | None] = {}
        self._sites = 0

    def function(self, name: str) -> relax.Function:
        """The module's Relax function of that name."""
        if name not in self._functions:
            refuse(f"the module has no Relax function {name!r}", fix=f"it has {listing(list(self._functions))}")
        return self._functions[name]

    def parameter(self, function: str, var: relax.Var) -> Value:
        name = var.name_hint
        value = Value(self._unique(name), tensor_type(var.struct_info, f"parameter {name!r}"))
        self.note(function, name, value)
        return value

    def body(
        self,
        function: str,
        func: relax.Function,
        args: Sequence[Tree],
        scopes: tuple[Scope, ...],
        region: Region | None = None,
    ) -> Tree:
        """The nodes of a function's body on `args`, and what it returns."""
        env = dict(zip(func.params[:], args, strict=True))
        return _Body(self, function, env, scopes, region).expression(func.body)

    def enter(self, name: str, args: list[Tree], scopes: tuple[Scope, ...], region: Region | None = None) -> Tree:
        """The nodes of a call of a module's function."""
        func = self.sized(self.function(name), args)
        if any(scope.function == name for scope in scopes):
            refuse(
                f"function {name!r} calls itself",
                why="its calls can't be laid out ahead",
                fix="end the function by an If of which one branch ends by the call, and nothing else calls it",
            )
        args = [self._annotated(name, param, arg, scopes) for param, arg in zip(func.params, args, strict=True)]
        self._sites += 1
        scope = Scope(name, self._sites)
        if func not in self._recursions:
            self._recursions[func] = recursion_of(name, func)
        if (recursion := self._recursions[func]) is not None:
            return LoopReader(self, name, recursion, scopes, scope, region).read(args)
        return self.body(name, func, args, (*scopes, scope), region)

    def sized(self, func: relax.Function, args: Sequence[Tree]) -> relax.Function:
        """The function with the sizes that its arguments bring in place of its symbols."""
        sizes: dict[tirx.Var, int] = {}
        for param, arg in zip(func.params, args, strict=True):
            for info, value in zip(tensor_infos(param.struct_info), leaves(arg), strict=True):
                known = info.shape.values if isinstance(info.shape, relax.ShapeExpr) else ()
                sizes |= {s: n for s, n in zip(known, value.type.shape, strict=False) if isinstance(s, tirx.Var)}
        if not sizes:
            return func
        key = (func, tuple(sizes.values()))
        if key not in self._known_sizes:
            self._known_sizes[key] = func.bind_symbolic_vars(sizes)
        return self._known_sizes[key]

    def bindings(
        self, function: str, env: dict[relax.Var, Tree], scopes: tuple[Scope, ...], region: Region | None
    ) -> _Body:
        """What reads bindings of a function where variables are these values."""
        return _Body(self, function, env, scopes, region)

    def devices(self, function: str, name: str, scopes: tuple[Scope, ...]) -> Devices:
        """What manual computations do, bound to a name."""

        def emit(make: Callable[..., relax.Expr], values: Sequence[Value]) -> Value:
            call = op_call(relax.BlockBuilder().normalize(make(*(value.variable() for value in values))))
            (made,) = self.add(call, list(values), function, name, scopes, note=False)
            return made

        return Devices(self.mesh, emit, self.constant, self.varying)

    def tried(self, read: Callable[[], Tree | None]) -> Tree | None:
        """What reads something; where it gives None, as if it had not been read."""
        count, notes, names, sites = len(self.nodes), dict(self.annotations), dict(self._names), self._sites
        loops, constants = dict(self.loops), dict(self._constants)
        if (made := read()) is None:
            del self.nodes[count:]
            self.annotations, self._names, self._sites, self.loops = notes, names, sites, loops
            self._constants = constants
        return made

    def kernel(self, var: relax.Expr) -> tirx.PrimFunc:
        """The TIR function that a call_tir names."""
        return self._mod[var]

    def constant(self, constant: relax.Constant) -> Value:
        if constant not in self._constants:
            value = Value(self._unique("const"), tensor_type(constant.struct_info, "a constant"), constant)
            self._constants[constant] = value
        return self._constants[constant]

    def add(
        self,
        call: OpCall,
        inputs: list[Value],
        function: str,
        name: str,
        scopes: tuple[Scope, ...],
        kernel: tirx.PrimFunc | None = None,
        *,
        note: bool = True,
    ) -> list[Value]:
        outputs = [Value(self._unique(name), out) for out in call.outputs]
        self.nodes.append(Node(call, tuple(inputs), tuple(outputs), scopes, f"{function}.{name}", kernel))
        if axes := node_axes(self.nodes[-1], self.varying, self.mesh):
            self.varying |= dict.fromkeys(outputs, axes)
        if len(outputs) == 1 and note:
            self.note(function, name, outputs[0])
        return outputs

    def _annotated(self, function: str, param: relax.Var, arg: Tree, scopes: tuple[Scope, ...]) -> Tree:
        """A parameter of a called function with a layout of its own: a point where the layout may change."""
        if (function, param.name_hint) not in self._stated or not isinstance(arg, Value):
            return arg
        stand_in = relax.Var(param.name_hint, arg.info)
        call = OpCall(ANNOTATE, stand_in, (arg.type,), (arg.type,))
        return self.add(call, [arg], function, param.name_hint, scopes)[0]

    def note(self, function: str, name: str, value: Value) -> None:
        """What was stated for a variable is stated of this value."""
        stated = self._stated.get((function, name))
        if stated is not None:
            manual = [axis for axis, _ in self.varying.get(value, ()) if stated.states(axis)]
            if manual:
                refuse(
                    [f"{name!r} is annotated along {axis!r}, which is manual there" for axis in manual],
                    where=f"{function}.{name}",
                    why="every device has a value of its own along it",
                    fix="state what the other axes do, or annotate it outside of the manual computation",
                )
            self.annotations[value] = stated

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}_{count - 1}")


class _Body:
    """One function's bindings."""

    def __init__(
        self,
        reader: _Reader,
        function: str,
        env: dict[relax.Var, Tree],
        scopes: tuple[Scope, ...],
        region: Region | None,
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
        then, other = (self.expression(branch, name) for branch in (expr.true_branch, expr.false_branch))
        assert isinstance(cond, Value)
        return self._select(cond, then, other, name)

    def _select(self, cond: Value, then: Tree, other: Tree, name: str) -> Tree:
        if isinstance(then, tuple) and isinstance(other, tuple):
            return tuple(self._select(cond, a, b, name) for a, b in zip(then, other, strict=True))
        assert isinstance(then, Value)
        assert isinstance(other, Value)
        operands = [cond, then, other]
        stand_ins = [v.variable() for v in operands]
        call = relax.BlockBuilder().normalize(relax.op.where(*stand_ins))
        return self._reader.add(op_call(call), operands, self._function, name, self._scopes)[0]


# By kind of expression: how it is read, given the name of what it is bound to.
_READ: dict[type, Callable[[_Body, relax.Expr, str], Tree]] = {
    relax.SeqExpr: _Body.sequence,
    relax.Var: _Body.variable,
    relax.DataflowVar: _Body.variable,
    relax.Constant: _Body.constant,
    relax.Tuple: _Body.fields,
    relax.TupleGetItem: _Body.field,
    relax.If: _Body.branches,
    relax.ShapeExpr: _Body.shape,
    relax.Call: _Body.call,
}
