"""The rule of every node of a Graph: that of its operator; or, where that is a kernel, the OpRule that follows from
the kernel's own sharding rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.window import Reaches
from mesh_tensor.rules.kernel.coordinates import detached_indices, without_loads
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse
from mesh_tensor.rules.kernel.workspaces import workspace_dims
from mesh_tensor.rules.operator import OpRule, has_rule, rule_of
from mesh_tensor.rules.operator.rule import InnerReduction, whole_rule
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import int_or
from mesh_tensor.tir.prover import Prover

from .ir import ANNOTATE, Graph, Node
from .tir_atoms import divides_groups, in_groups, plain_dims, with_compound_dims
from .tir_linear import linear_operands

Sizes = Mapping[tirx.Var, int]  # of symbols
_TYPICAL = 1024


def kernel_rule(node: Node, mesh: Mesh) -> OpRule:
    """How the dims of a kernel's operands and results relate. It minds its tiles' padding itself; tiles have to be
    contiguous along dims that can't be taken apart in it. Dims are in groups where the mesh's axes divide these.
    Refused where the kernel writes an operand, or needs what a result held before; the message names the binding."""
    assert node.kernel is not None
    try:
        analysis = analysed(node.kernel)
        _check(node, analysis)
    except MeshTensorError as error:
        raise MeshTensorError(f"{error}\n  binding: {node.where}") from None
    names = list(analysis.kernel.params)
    inputs, outputs = names[: len(node.inputs)], names[len(node.inputs) :]
    plain, linear = plain_dims(analysis), linear_operands(analysis, inputs)
    found = None if plain else in_groups(analysis)
    if found is not None and divides_groups(mesh, found[0]):
        made, after = found
        rule = rule_of_analysis(after, inputs, outputs, _split_factors(after, outputs))
        rule = replace(rule, linear=linear, positional=frozenset(factor.name for factor in after.factors))
        return with_compound_dims(rule, made, inputs, outputs)
    rule = rule_of_analysis(analysis, inputs, outputs, _split_factors(analysis, outputs))
    contiguous = frozenset(factor.name for factor in analysis.factors if not plain.issuperset(factor.dims))
    return replace(rule, linear=linear, positional=contiguous)


def counted(node: Node) -> frozenset[str]:
    """The factors of a kernel whose loop variables it computes with, or looks up or tests places by: what it makes of
    an element depends on where this stands."""
    assert node.kernel is not None
    analysis = analysed(node.kernel)
    found = set()
    for factor in analysis.factors:
        for statement in analysis.kernel.statements:
            apart = detached_indices(statement, analysis.coordinates)
            expressions = [*statement.values, *statement.conditions, *statement.bounds, *apart]
            if vars_of([without_loads(e) for e in expressions], analysis.kernel.binds) & factor.roles.keys():
                found.add(factor.name)
    return frozenset(found)


def rule_of_analysis(
    analysis: Analysis,
    inputs: Sequence[str],
    outputs: Sequence[str],
    factors: Collection[Factor],
    sizes: Sizes = MappingProxyType({}),
) -> OpRule:
    """How the dims of a kernel's parameters relate, as far as axes may split `factors`; what it reads are operands,
    what it writes are results, and some parameters are both. `sizes`: those of symbols, as far as they are known."""
    params = analysis.kernel.params
    walked = {place: factor.name for factor in factors for place in factor.dims}
    dims = {name: tuple(walked.get((name, dim)) for dim in range(len(buffer.shape))) for name, buffer in params.items()}
    partial = [_partial_ops(name, factors, analysis) for name in outputs]
    return OpRule(
        tuple(dims[name] for name in inputs),
        tuple(dims[name] for name in outputs),
        {factor: op for ops in reversed(partial) for factor, op in ops.items()},
        tuple(partial),
        blocks={factor.name: factor.block for factor in factors if factor.aligned is not None},
        first={factor.name: factor.block for factor in factors if factor.first is not None},
        inner=tuple(one for factor in factors for one in _inner(factor, analysis, sizes)),
        windows=dict(_windows(inputs, factors, analysis)),
        masks=True,
    )


def _windows(
    inputs: Sequence[str], factors: Collection[Factor], analysis: Analysis
) -> Iterator[tuple[tuple[int, int], Reaches]]:
    for (param, dim), (factor, reaches) in analysis.windows.items():
        if factor is not None and factor in factors and param in inputs:
            yield (inputs.index(param), dim), reaches


def known_size(size: tirx.PrimExpr | int, sizes: Sizes) -> tirx.PrimExpr | int:
    """A size, where its symbols have these sizes."""
    if not sizes or isinstance(size, (int, tirx.IntImm)):
        return size
    return Prover().simplify(substitute(size, {v: tirx.IntImm(v.dtype, n) for v, n in sizes.items()}))


def typical_size(size: tirx.PrimExpr | int, sizes: Sizes) -> int:
    """The same as a number; for one that is not known yet, one to decide with."""
    known = known_size(size, sizes)
    return int_or(known, _TYPICAL)


@lru_cache(maxsize=1024)
def analysed(kernel: tirx.PrimFunc) -> Analysis:
    """The analysis of a kernel, made once."""
    return analyse(normalize(kernel))


def _check(node: Node, analysis: Analysis) -> None:
    assert node.kernel is not None
    name, params = str(node.kernel.attrs["global_symbol"]), list(analysis.kernel.params)
    inputs, outputs = params[: len(node.inputs)], params[len(node.inputs) :]
    facts = [f"kernel {name!r} writes its operand {param!r}" for param in inputs if analysis.written(param)]
    facts += [f"kernel {name!r} never writes its result {param!r}" for param in outputs if not analysis.written(param)]
    facts += [
        f"kernel {name!r} needs what its result {param!r} held before"
        for param in outputs
        if analysis.written(param) and not _starts(param, analysis)
    ]
    if facts:
        refuse(
            facts,
            why="R.call_tir computes new tensors, and leaves its operands as they are",
            fix="take operands first, then outputs; start sums in the kernel, or pass what they start with",
        )


def _starts(param: str, analysis: Analysis) -> bool:
    """Whether something in the kernel stores to the result, not only adds to it."""
    buffer = analysis.kernel.params[param]
    return any(s.writes(buffer) and (s.op is None or s.fresh or s.unknown) for s in analysis.kernel.statements)


def _split_factors(analysis: Analysis, outputs: Sequence[str]) -> list[Factor]:
    """The factors that axes may split."""
    if any(analysis.read(param) and not analysis.only_kept(param) for param in outputs):
        return []  # one part of a result is made from another
    return [factor for factor in analysis.factors if _splits(factor)]


def _splits(factor: Factor) -> bool:
    """Whether an axis may split the factor: it walks no tensor twice."""
    counts = Counter(param for param, _ in factor.dims)
    return factor.blocked is None and all(count == 1 for count in counts.values())


def _partial_ops(param: str, factors: Collection[Factor], analysis: Analysis) -> dict[str, str]:
    """The factors that leave a result to be completed after the kernel, with the op; not what is completed inside."""
    buffer = analysis.kernel.params[param]
    found: dict[str, str] = {}
    for factor in factors:
        reduction = analysis.reductions[factor]
        if reduction.cut is None and not any(param == other for other, _ in factor.dims):
            for live_range, op in reduction.partial.items():
                if live_range.is_param and live_range.buffer.same_as(buffer):
                    found[factor.name] = op
    return found


def _inner(factor: Factor, analysis: Analysis, sizes: Sizes) -> Iterator[InnerReduction]:
    """What is completed inside the kernel after the factor was split."""
    reduction = analysis.reductions[factor]
    for scan in reduction.scans:
        op = "turns" if scan.in_turns else "scan"
        for part in (part for part in scan.carried if part.copied is None):
            yield _inner_value(factor, op, part.held, analysis, sizes, ends=False)
    if reduction.cut is None:
        return
    rest = [statement for statement in analysis.kernel.statements if statement.top >= reduction.cut]
    ends = not any(analysis.coordinates.walks(access, factor) for s in rest for access in s.accesses)
    for live_range in reduction.completed:
        yield _inner_value(factor, reduction.partial[live_range], live_range, analysis, sizes, ends=ends)


def _inner_value(
    factor: Factor, op: str, live_range: LiveRange, analysis: Analysis, sizes: Sizes, *, ends: bool
) -> InnerReduction:
    dims = workspace_dims(live_range, analysis)
    names = tuple(None if dim.factor is None else dim.factor.name for dim in dims)
    shape = tuple(typical_size(dim.size, sizes) for dim in dims)
    return InnerReduction(factor.name, op, names, shape, live_range.buffer.dtype, ends)


def node_rules(graph: Graph, *, replicate_unknown: bool) -> dict[Node, OpRule]:
    """The rule of every node; alike calls have one. Refused where an operator has no rule, and is not to be taken as
    one that needs everything whole."""
    known: dict[tuple, OpRule] = {}
    rules = {}
    for node in graph.nodes:
        if node.kernel is not None:
            rules[node] = kernel_rule(node, graph.mesh)
            continue
        kind = (ANNOTATE, node.call.inputs[0]) if node.is_annotation else node.call.kind
        rule = known.get(kind)
        if rule is None:
            rule = known[kind] = _rule(node, replicate_unknown)
        rules[node] = rule
    return rules


def _rule(node: Node, replicate_unknown: bool) -> OpRule:
    if node.is_annotation:
        return OpRule((_dims(node),), (_dims(node),), moves=True)
    if node.call.name == "call_tir_inplace":
        refuse(
            "R.call_tir_inplace can't be distributed",
            where=node.where,
            why="it overwrites its operands",
            fix="use R.call_tir, whose results are new tensors",
        )
    if node.call.name in ("dist.call_tir_local_view", "dist.redistribute_replica_to_shard"):
        refuse(
            f"R.{node.call.name} is of TVM's local view, and modules are in global view",
            where=node.where,
            why="it takes and gives one device's tiles",
            fix="call the function over whole tensors (R.dist.call_tir), or say what one device does by "
            "mt.manual_computation",
        )
    if replicate_unknown and not has_rule(node.call.operator):
        return whole_rule(node.call)
    return rule_of(node.call, node.where)


def _dims(node: Node) -> tuple[str, ...]:
    return tuple(f"d{dim}" for dim in range(node.call.inputs[0].ndim))
