"""What has to hold after each stage of the lowering. A violation is a bug of the compiler, never of its user.

    local      no access leaves its tile; no global extent bounds a loop over a split factor; plain TIR
    explicit   every layout change is a collective; partial values reach no use that needs whole ones

`pipeline` has the stages before these, `mesh_tensor.program.verify` the Programs after them. With
MESH_TENSOR_VERIFY=1 in the environment, every lowering checks itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import tirx

from mesh_tensor.annotations.annotate import INFO_ATTR, MESH_ATTR, TILES_ATTR
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.redistribution.plan import illegal_move
from mesh_tensor.rules.kernel.factors import goes_beyond, tile_extent
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import buffer_params
from mesh_tensor.tir.bounds import accesses_outside
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.views import declared

from .local_view import Collective, LocalKernel, Lowered, Tensor
from .splits import ceildiv


class VerificationError(AssertionError):
    """A stage left something that must not be there: all of it, one fact per line."""


def enabled() -> bool:
    """Whether every lowering is to be checked (MESH_TENSOR_VERIFY=1)."""
    return os.environ.get("MESH_TENSOR_VERIFY", "") not in ("", "0")


def raise_on(problems: list[str], what: str) -> None:
    """Raise a VerificationError if there are problems."""
    if problems:
        raise VerificationError("\n  ".join([f"{what} is not legal:", *problems]))


def local_problems(
    func: tirx.PrimFunc,
    analysis: Analysis,
    assignment: Assignment,
    mesh: Mesh,
    *,
    over_tiles: bool,
    axes: Sequence[str] = (),
) -> list[str]:
    """What is wrong with a local kernel, which was made of what was analysed. Its last parameters are the coordinates
    on `axes`."""
    problems = [*leftovers(func), *collectives_in(func)]
    if not over_tiles:
        problems += _long_loops(func, analysis, assignment, mesh)
    coordinates = dict(zip(func.params[len(func.params) - len(axes) :], map(mesh.size, axes), strict=True))
    unchecked = {*analysis.coordinates.detached, *_left_as_they_are(analysis)}
    problems += accesses_outside(func, unchecked, coordinates)
    if not tirx.analysis.verify_well_formed(declared(func), assert_mode=False):
        problems.append("it is not well-formed: a variable is used but not defined, or defined twice")
    return problems


def explicit_problems(lowered: Lowered) -> list[str]:
    """What is wrong with how the layouts of a lowered kernel's tensors chain."""
    return [*_Chain(lowered).problems(), *_ends(lowered)]


# -- one local kernel --------------------------------------------------------------------------------------------------


def leftovers(func: tirx.PrimFunc) -> list[str]:
    """Annotations of the global view that are still on the function."""
    attrs = func.attrs or {}
    return [f"attribute {name} is still on it" for name in (INFO_ATTR, MESH_ATTR, TILES_ATTR) if name in attrs]


def collectives_in(func: tirx.PrimFunc) -> list[str]:
    """The collectives inside a kernel: there must be none."""
    names = [op_name(call) for call in nodes(func.body, tirx.Call)]
    return [f"{name} is inside it" for name in names if name.startswith("mesh.")]


def _left_as_they_are(analysis: Analysis) -> Iterator[tuple[str, int]]:
    """The dims that statements write which are not understood, and so stay as the author wrote them."""
    for statement in analysis.kernel.statements:
        for buffer in statement.may_write if statement.unknown else ():
            yield from ((buffer.name, dim) for dim in range(len(buffer.shape)))


def _long_loops(func: tirx.PrimFunc, analysis: Analysis, assignment: Assignment, mesh: Mesh) -> list[str]:
    """Loops over a split factor that run further than the tile."""
    extents = {loop.loop_var: loop.extent for loop in nodes(func.body, tirx.For)}
    analyzer, problems = Prover(), []
    for factor in analysis.factors:
        parts = [mesh.size(axis) for axis in assignment.axes_of(factor)]
        if all(n == 1 for n in parts):
            continue
        tile = tirx.convert(tile_extent(assignment.walked(factor, parts), parts))
        for form in analysis.coordinates.forms[factor]:
            var, coefficient = form.ordered[0]
            loop = analysis.kernel.loops.get(var)
            if loop is not None and len(form.terms) == 1 and goes_beyond(loop.extent, coefficient, factor.size):
                continue  # it goes on behind the dim, and so behind the tile
            if var in extents and not analyzer.can_prove(extents[var] <= ceildiv(tile, coefficient)):
                problems.append(f"loop {var} runs {extents[var]} times over tiles of {tile} in blocks of {coefficient}")
    return problems


def other_tiles(step: LocalKernel, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The parameters of a local kernel that are not as long as the tiles that it is given. Compiled, it would read and
    write others' memory."""
    for (param, buffer), arg in zip(buffer_params(step.func).items(), step.args, strict=True):
        tile = tensors[arg].sharding.tile_shape(tensors[arg].shape)
        if not _same_shape(buffer.shape, tile):
            yield f"parameter {param} has shape {list(buffer.shape)}, the tiles of {arg} have {list(tile)}"


# -- layouts -----------------------------------------------------------------------------------------------------------


class _Chain:
    """Follows the tensors through the steps."""

    def __init__(self, lowered: Lowered):
        self.lowered = lowered
        self.holds: dict[str, str] = {}  # storage -> the tensor that it holds now
        for _, given, _ in lowered.parameters:
            if given is not None:
                self._set(given)

    def problems(self) -> list[str]:
        found: list[str] = []
        kinds: dict[type, Callable[[Any], Iterator[str]]] = {LocalKernel: self._kernel, Collective: self._collective}
        for number, step in enumerate(self.lowered.steps):
            found += [f"step {number}: {fact}" for fact in kinds[type(step)](step)]
        return found

    def final(self, name: str) -> bool:
        """Whether the tensor is there in the end."""
        return self.holds.get(self._tensor(name).storage) == name

    def _tensor(self, name: str) -> Tensor:
        return self.lowered.tensors[name]

    def _set(self, name: str) -> None:
        self.holds[self._tensor(name).storage] = name

    def _missing(self, name: str) -> list[str]:
        held = self.holds.get(self._tensor(name).storage)
        if held == name:
            return []
        return [f"{name} is used before it is defined" if held is None else f"{name} was overwritten by {held}"]

    def _kernel(self, step: LocalKernel) -> Iterator[str]:
        for param, arg in zip(buffer_params(step.func), step.args, strict=True):
            tensor = self._tensor(arg)
            needed, produced = step.assignment.needed.get(param), step.assignment.produced.get(param)
            if needed is None and produced is None:
                yield f"parameter {param} has no placement"
            if needed is not None:
                read = step.analysis.kernel.uses(step.analysis.kernel.params[param])
                yield from self._input(arg, needed, in_out=produced is not None, read=read)
            if produced is not None and tensor.sharding != produced:
                yield f"{arg} lies as {tensor.sharding}, but the kernel leaves {produced}"
        yield from other_tiles(step, self.lowered.tensors)
        for name in step.writes:
            self._set(name)

    def _input(self, arg: str, needed: Sharding, *, in_out: bool, read: bool) -> Iterator[str]:
        """An in-out tensor may change its layout under the kernel: what it was before has the same storage."""
        before = self.holds.get(self._tensor(arg).storage) if in_out else arg
        if before is None:
            yield f"{arg} is used before it is defined"
            return
        yield from self._missing(before)
        layout = self._tensor(before).sharding
        if layout != needed:
            yield f"{before} lies as {layout}, but the kernel needs {needed}"
        if layout.partial and read and not in_out:
            yield f"{before} is partial ({layout}), and the kernel reads it"

    def _collective(self, step: Collective) -> Iterator[str]:
        yield from self._missing(step.src)
        src, dst = self._tensor(step.src), self._tensor(step.dst)
        if (src.shape, src.dtype) != (dst.shape, dst.dtype):
            yield f"{step.src} and {step.dst} are not the same tensor"
        if dst.sharding != step.move.after:
            yield f"{step.dst} lies as {dst.sharding}, but {step.move.kind} leaves {step.move.after}"
        yield from (f"{step.move.kind} of {step.src}: {fact}" for fact in illegal_move(src.sharding, step.move))
        self._set(step.dst)


def _ends(lowered: Lowered) -> Iterator[str]:
    """Outputs are there, complete and as annotated; inputs come in as annotated."""
    chain = _Chain(lowered)
    chain.problems()
    for param, given, left in lowered.parameters:
        asked = lowered.asked.get(param)
        for name in (given, left):
            layout = None if name is None else lowered.tensors[name].sharding
            if layout is not None and asked is not None and layout != asked:
                yield f"{param} is annotated {asked}, but {name} lies as {layout}"
            if layout is not None and asked is None and layout.partial:
                yield f"{param} is not annotated, and {name} is partial ({layout})"
        if left is not None and not chain.final(left):
            yield f"{left}, the result of {param}, is not there in the end"


def _same_shape(a: Sequence[tirx.PrimExpr], b: Sequence[tirx.PrimExpr]) -> bool:
    return len(a) == len(b) and all(_is_same_size(x, y) for x, y in zip(a, b, strict=True))


def _is_same_size(a: tirx.PrimExpr, b: tirx.PrimExpr) -> bool:
    if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm):
        return int(a) == int(b)
    return bool(Prover().can_prove_equal(a, b))
