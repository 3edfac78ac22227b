"""GraphReader: from a Relax function of known sizes to a Graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import ir, relax, tirx

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.annotations.names import relax_function, relax_functions
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import OpCall, op_call, tensor_infos, tensor_type
from mesh_tensor.tir.plain_statements import with_contiguous_rows

from .bindings import Bindings
from .ir import (
    ANNOTATE,
    STATE_ATTR,
    Graph,
    GraphLoop,
    Node,
    Scope,
    Scopes,
    Tree,
    Value,
    chosen_rows,
    leaves,
    nodes_before,
)
from .loop_reader import LoopReader
from .loops import Recursion, recursion_of
from .manual import Axes, Region, node_axes
from .manual_devices import Devices
from .sorted_rows import rows_in_place

# (function name, variable name) -> what was stated for it
Annotations = Mapping[tuple[str, str], Annotation]


def read_graph(
    mod: ir.IRModule, function: str, mesh: Mesh, annotations: Annotations, *, loops: bool = False, experts: bool = True
) -> Graph:
    """The Graph of a function of `mod`, with all calls of other Relax functions entered. `loops`: those that end by
    calling themselves are loops of the graph; else their steps are unrolled. `experts`: those of `mt.experts` are, too;
    else each is one node. Refused where the function is missing or recursive, a size is symbolic, or an expression is
    no operator, call, tuple or If."""
    reader = GraphReader(mod, mesh, annotations, loops, experts)
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
    graph.chosen_rows = chosen_rows(func)
    if reader.loops:
        # What rows of loops are put into is never made.
        graph.loops = reader.loops
        graph.nodes = nodes_before(graph.nodes, graph.kept(), lambda node: bool(node.mark))
    _check_groups(graph)
    return rows_in_place(graph)


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
    """By parameter the result that replaces it in the next call."""
    by_name = {param.name: param for param in params}
    attr, results = (func.attrs or {}).get(STATE_ATTR, {}), leaves(body)
    return {by_name[name]: results[int(number)] for name, number in attr.items()}


class GraphReader:
    """Reads the functions of a module into one list of nodes. `manual`: the axes of manual computations. `taken`: what
    says whether the branch that is read is taken."""

    def __init__(self, mod: ir.IRModule, mesh: Mesh, annotations: Annotations, with_loops: bool, experts: bool) -> None:
        self.mesh, self.nodes = mesh, list[Node]()
        self.loops: dict[Scope, GraphLoop] = {}
        self.with_loops, self.experts = with_loops, experts
        self.varying: dict[Value, Axes] = {}
        self.manual: set[str] = set()  # axes
        self.taken: Value | None = None
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
        return self._functions[name] if name in self._functions else relax_function(self._mod, name)

    def parameter(self, function: str, var: relax.Var) -> Value:
        name = var.name_hint
        value = Value(self._unique(name), tensor_type(var.struct_info, f"parameter {name!r}"))
        self.note(function, name, value)
        return value

    def body(
        self, function: str, func: relax.Function, args: Sequence[Tree], scopes: Scopes, region: Region | None = None
    ) -> Tree:
        """The nodes of a function's body on `args`, and what it returns."""
        env = dict(zip(func.params[:], args, strict=True))
        return Bindings(self, function, env, scopes, region).expression(func.body)

    def enter(self, name: str, args: list[Tree], scopes: Scopes, region: Region | None = None) -> Tree:
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

    def bindings(self, function: str, env: dict[relax.Var, Tree], scopes: Scopes, region: Region | None) -> Bindings:
        """What reads bindings of a function where variables are these values."""
        return Bindings(self, function, env, scopes, region)

    def devices(self, function: str, name: str, scopes: Scopes) -> Devices:
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
        return with_contiguous_rows(self._mod[var])

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
        scopes: Scopes,
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

    def _annotated(self, function: str, param: relax.Var, arg: Tree, scopes: Scopes) -> Tree:
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
