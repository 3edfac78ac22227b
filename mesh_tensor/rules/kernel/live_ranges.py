"""Live ranges of on-chip buffers: which writes may reach which reads.

A kernel reuses its staging buffers. What a buffer's dims mean can differ from one use to the next, so everything is
said of *live ranges*: a new one begins where the whole buffer is overwritten, two merge where a read may see either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tvm import tirx

from mesh_tensor.base.joined import Joined
from mesh_tensor.tir.nodes import loads, nodes

from .statements import Access, Kernel, Loop, Statement, used_vars


@dataclass(eq=False)
class LiveRange:
    """One live range of an on-chip buffer, or a parameter (which has a single one for the whole kernel)."""

    buffer: tirx.Buffer
    is_param: bool
    reads: list[tuple[Statement, Access]] = field(default_factory=list)
    writes: list[tuple[Statement, Access]] = field(default_factory=list)
    carried: set[tirx.Var] = field(default_factory=set)

    @cached_property
    def scope(self) -> list[Loop]:
        """The loops, outermost first, in one iteration of which the whole live range lies."""
        if self.is_param:
            return []
        stacks = [[x for x in s.loops if x.kind != "tile"] for s, _ in (*self.reads, *self.writes)]
        common: list[Loop] = []
        for level in zip(*stacks, strict=False):
            if any(loop is not level[0] for loop in level) or level[0].var in self.carried:
                break
            if level[0].kind == "parallel" and self._indexed_by(level[0].var):
                break
            common.append(level[0])
        return common

    def _indexed_by(self, var: tirx.Var) -> bool:
        """Whether the iterations of a loop have elements of their own, rather than all of them the same ones."""
        forms = (form for _, access in (*self.reads, *self.writes) for form in access.forms)
        return any(form is None or var in form.terms for form in forms)


#: The loop variables that what a live range holds may depend on.
Taints = dict[LiveRange, set[tirx.Var]]


class LiveRanges:
    """The live ranges of a kernel; `of(access)` is the one that an access belongs to."""

    def __init__(self, kernel: Kernel):
        self._joined = Joined[int]()
        self._find = self._joined.root
        self._of_access: dict[int, int] = {}
        self._buffers: list[tirx.Buffer] = []
        self._carried: list[set[tirx.Var]] = []
        self._kept: list[tuple[tirx.Var, int, int]] = []
        self._kernel = kernel
        self._param_ids = {buffer: self._new(buffer) for buffer in kernel.params.values()}
        # what buffers hold before all writes is seen where these may not have run, and by the first iterations of loops
        self._walk(kernel.tree, {buffer: {self._new(buffer)} for buffer in self._on_chip()})
        for var, before, inside in self._kept:
            if self._find(before) == self._find(inside):
                self._carried[self._find(inside)].add(var)
        self._ranges = self._collect()
        self._by_access = {access: self._ranges[self._find(made)] for access, made in self._of_access.items()}

    def of(self, access: Access) -> LiveRange:
        return self._by_access[id(access)]

    @property
    def all(self) -> list[LiveRange]:
        return [r for r in self._ranges.values() if r.is_param or r.reads or r.writes]

    def _on_chip(self) -> dict[tirx.Buffer, None]:
        accessed = (access.buffer for statement in self._kernel.statements for access in statement.accesses)
        return dict.fromkeys(buffer for buffer in accessed if buffer not in self._param_ids)

    def _new(self, buffer: tirx.Buffer) -> int:
        self._buffers.append(buffer)
        self._carried.append(set())
        return len(self._buffers) - 1

    def _union(self, ids: set[int]) -> int:
        roots = sorted({self._find(i) for i in ids})
        for root in roots[1:]:
            self._joined.join(roots[0], root)
            self._carried[roots[0]] |= self._carried[root]
        return roots[0]

    def _current(self, buffer: tirx.Buffer, env: dict[tirx.Buffer, set[int]], exposed: set) -> int:
        """The live range that a use of `buffer` sees here; notes that it comes from before the loops around."""
        if buffer in self._param_ids:
            return self._param_ids[buffer]
        exposed.add(buffer)
        root = self._union(env[buffer])
        env[buffer] = {root}
        return root

    def _walk(self, tree: list, env: dict) -> tuple[set, set]:
        """Give every access in `tree` its live range; returns the buffers whose earlier content may be used in it, and
        those that it certainly overwrites."""
        exposed: set = set()
        killed: set = set()
        for node in tree:
            if isinstance(node, Statement):
                inner, kills = self._statement(node, env)
            elif node[0] == "loop":
                inner, kills = self._loop(node, env)
            else:
                inner, kills = self._branch(node, env)
            exposed |= inner - killed
            killed |= kills
        return exposed, killed

    def _statement(self, statement: Statement, env: dict) -> tuple[set, set]:
        exposed: set = set()
        for access in statement.reads:
            if id(access) not in self._of_access:  # what a variable was bound to was read where it was bound
                self._of_access[id(access)] = self._current(access.buffer, env, exposed)
        write = statement.write
        if write is None:
            return exposed, set()
        if write.buffer not in self._param_ids and overwrites_all(statement, self._kernel):
            fresh = self._new(write.buffer)
            env[write.buffer] = {fresh}
            self._of_access[id(write)] = fresh
            return exposed, {write.buffer}
        self._of_access[id(write)] = self._current(write.buffer, env, exposed)
        return exposed, set()

    def _loop(self, node: tuple, env: dict) -> tuple[set, set]:
        _, loop, tree = node
        before = {buffer: set(ids) for buffer, ids in env.items()}
        exposed, killed = self._walk(tree, env)
        for buffer, ids in before.items():
            # what some iterations leave as it was, and others do not
            self._kept += [(loop.var, old, new) for old in ids & env[buffer] for new in env[buffer] - ids]
        for buffer in exposed & set(env):
            root = self._union(before.get(buffer, set()) | env[buffer])
            env[buffer] = {root}
            if not self._kernel.is_idle(loop.var):
                self._carried[root].add(loop.var)
        if not (loop.kind == "grid" or (isinstance(loop.extent, tirx.IntImm) and int(loop.extent) >= 1)):
            for buffer, ids in before.items():
                env[buffer] = env.get(buffer, set()) | ids
            return exposed, set()
        return exposed, killed

    def _branch(self, node: tuple, env: dict) -> tuple[set, set]:
        _, then, otherwise = node
        other = {buffer: set(ids) for buffer, ids in env.items()}
        exposed, killed = self._walk(then, env)
        also_exposed, also_killed = self._walk(otherwise, other)
        for buffer, ids in other.items():
            env[buffer] = env.get(buffer, set()) | ids
        return exposed | also_exposed, killed & also_killed

    def _collect(self) -> dict[int, LiveRange]:
        ranges = {
            root: LiveRange(self._buffers[root], self._buffers[root] in self._param_ids, carried=self._carried[root])
            for root in {self._find(i) for i in range(len(self._buffers))}
        }
        for buffer, root in self._param_ids.items():
            ranges[self._find(root)].carried |= _carried(buffer, self._kernel)
        for statement in self._kernel.statements:
            for access in statement.reads:
                ranges[self._find(self._of_access[id(access)])].reads.append((statement, access))
            if statement.write is not None:
                ranges[self._find(self._of_access[id(statement.write)])].writes.append((statement, statement.write))
        return ranges


def _carried(param: tirx.Buffer, kernel: Kernel) -> set[tirx.Var]:
    """The loops that both use a parameter's content and store to it: one iteration may see what another left."""
    used: set[tirx.Var] = set()
    stored: set[tirx.Var] = set()
    for statement in kernel.statements:
        if statement.writes(param):
            stored |= statement.vars
        if (statement.op and statement.writes(param)) or any(param.same_as(a.buffer) for a in statement.reads):
            used |= statement.vars
    return used & stored


def overwrites_all(statement: Statement, kernel: Kernel) -> bool:
    """Whether the statement, over all its innermost loops, overwrites its whole buffer without reading what was
    there."""
    if statement.write is None or any(a.buffer.same_as(statement.write.buffer) for a in statement.reads):
        return False
    return covers_all(statement, kernel)


def covers_all(statement: Statement, kernel: Kernel) -> bool:
    """Whether the statement, over all its innermost loops, gives every element of its buffer a new value, once."""
    return (statement.op is None or statement.fresh) and reaches_all(statement, kernel)


def reaches_all(statement: Statement, kernel: Kernel) -> bool:
    """Whether the statement, over all its innermost loops, writes every element of its buffer once."""
    write = statement.write
    if write is None or statement.may_be_skipped:
        return False
    loops = {loop.var: loop for loop in statement.loops}
    seen: set[tirx.Var] = set()
    for form, size in zip(write.forms, write.buffer.shape, strict=True):
        if form is None or form.const != 0:
            return False
        below = 1
        for var, coefficient in form.ordered[::-1]:
            loop = loops.get(var)
            if loop is None or coefficient != below or var in seen or loop.kind == "grid":
                return False
            if not isinstance(loop.extent, tirx.IntImm) and len(form.terms) > 1:
                return False
            if not kernel.analyzer.can_prove_equal(loop.min, 0):
                return False
            below = coefficient * loop.extent
            seen.add(var)
        if not kernel.analyzer.can_prove_equal(below, size):
            return False
    return _unconditional(statement, seen, kernel) and _alone_in_nest(statement, seen, kernel)


def _unconditional(statement: Statement, index_vars: set[tirx.Var], kernel: Kernel) -> bool:
    """No condition around the store may change from one of its own indices to the next, so it covers all or (in a
    branch) nothing."""
    nest = {loop.var for loop in statement.loops if loop.var in index_vars and loop.kind != "tile"}
    inside = [s for s in kernel.statements if nest & s.vars]
    bound = {s.node.var for s in inside if isinstance(s.node, tirx.Bind)}
    used = [var for condition in statement.conditions for var in nodes(condition, tirx.Var)]
    if any(var in index_vars or var in bound for var in used):
        return False
    loaded = {load.buffer for condition in statement.conditions for load in loads(condition)}
    return not any(s.writes(buffer) for s in inside for buffer in loaded)


def _alone_in_nest(statement: Statement, index_vars: set[tirx.Var], kernel: Kernel) -> bool:
    """Within the loops that run over the buffer, every access to it is to the element just written."""
    nest = {loop.var for loop in statement.loops if loop.var in index_vars and loop.kind != "tile"}
    if not nest:
        return True
    write = statement.target
    for other in kernel.statements:
        if other is statement or not nest & {loop.var for loop in other.loops}:
            continue
        for access in other.accesses:
            if access.buffer.same_as(write.buffer) and not access.same_forms(write):
                return False
    return True


def find_taints(kernel: Kernel, ranges: LiveRanges) -> Taints:
    """For every live range, the loop variables that its content may depend on."""
    taints: Taints = {r: set() for r in ranges.all}
    changed = True
    while changed:
        changed = False
        for statement in kernel.statements:
            if statement.write is None:
                continue
            target = taints[ranges.of(statement.write)]
            size = len(target)
            target |= used_vars(statement, kernel)
            for access in statement.reads:
                target |= taints[ranges.of(access)]
            changed |= len(target) > size
    return taints
