"""What a kernel tells its user: `T.print` and `T.device_assert`.

TileLang writes `T.print` as plain statements: a copy of a fragment to shared memory, a test for the first thread, a
loop over a buffer's elements, a call. `mark_prints` puts each such group under one attribute, so that what reads the
kernel sees one statement that computes nothing. The calls may have more arguments than TileLang gives them, which only
targets of ours read: an element's global position, then names of axes and this device's coordinates on them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from .effects import op_name
from .nodes import loads, nodes
from .rewrite import loop_like, rewritten, sequence

#: The attribute around the statements of one `T.print`.
PRINT_ATTR = "mesh_tensor.print"

#: What a print calls, and how many arguments TileLang gives it: after the function's name, the message comes first.
PRINTS = {"debug_print_msg": 2, "debug_print_var": 3, "debug_print_buffer_value": 5}

#: What an assertion calls, and how many arguments TileLang gives it: the condition, the message.
ASSERTS = {"tl.device_assert": 1, "tl.device_assert_with_msg": 2}


@dataclass(frozen=True)
class Report:
    """What a print or an assertion says besides numbers. Its numbers are, in order: this device's coordinate on each of
    `axes`, the position of an element of `buffer` (`dims` numbers), and a value of `dtype`, unless that is empty."""

    asserts: bool
    text: str
    axes: tuple[str, ...] = ()
    buffer: str = ""
    dims: int = 0
    dtype: str = ""

    def encode(self) -> str:
        """As letters and digits."""
        return json.dumps(list(vars(self).values())).encode().hex()

    @staticmethod
    def decode(code: str) -> Report:
        asserts, text, axes, *rest = json.loads(bytes.fromhex(code))
        return Report(asserts, text, tuple(axes), *rest)


def report_of(call: tirx.Call) -> tuple[Report, list[tirx.PrimExpr]]:
    """What a print or an assertion says, and its numbers."""
    args = list(call.args)
    if call.op.name in ASSERTS:
        known = ASSERTS[call.op.name]
        more, text = args[known:], args[1].value if known > 1 else str(args[0])
        axes, here = _here(more)
        return Report(True, text.strip(), axes), here
    known = PRINTS[args[0].value]
    axes, here = _here(args[known:])
    where = args[known : len(args) - 2 * len(axes)]
    if known == PRINTS["debug_print_msg"]:
        return Report(False, args[1].value, axes), here
    value = args[known - 1]
    if known == PRINTS["debug_print_var"]:
        return Report(False, args[1].value, axes, dtype=value.dtype), [*here, value]
    where = where or [args[3]]
    return Report(False, args[1].value, axes, args[2].value, len(where), value.dtype), [*here, *where, value]


def _here(args: Sequence[tirx.PrimExpr]) -> tuple[tuple[str, ...], list[tirx.PrimExpr]]:
    """The axes named in the arguments, and the coordinates after them."""
    names = [place for place, arg in enumerate(args) if isinstance(arg, tirx.StringImm)]
    return tuple(args[place].value for place in names), [args[place + 1] for place in names]


def print_call(stmt: object) -> tirx.Call | None:
    """The call of a statement that prints; None for all other statements."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    if call is None or op_name(call) != "tirx.call_extern":
        return None
    return call if getattr(call.args[0], "value", None) in PRINTS else None


def assert_call(stmt: object) -> tirx.Call | None:
    """The call of a statement that asserts; None for all other statements."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    return call if op_name(call) in ASSERTS else None


def is_print(stmt: object) -> bool:
    """Whether the statement is all of one `T.print`."""
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == PRINT_ATTR


def printed_buffers(stmt: tirx.Stmt) -> set[tirx.Buffer]:
    """The buffers that a print reads."""
    return {load.buffer for load in loads(stmt)}


def message_only(text: str) -> tirx.Stmt:
    """A print of nothing but a message."""
    return _marked([tirx.Evaluate(tirx.call_extern("handle", "debug_print_msg", text))])


def without_reports_for_cpus(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with prints and assertions as TileLang knows them."""

    def plain(node: tirx.Stmt) -> tirx.Stmt | None:
        if is_print(node):
            return node.body
        call = assert_call(node) if print_call(node) is None else node.value
        if call is None:
            return None
        count = ASSERTS[call.op.name] if call.op.name in ASSERTS else PRINTS[call.args[0].value]
        return tirx.Evaluate(tirx.Call(call.dtype, call.op, list(call.args)[:count]))

    return rewritten(func, plain, tirx.AttrStmt, tirx.Evaluate)


def without_thread_tests(body: tirx.Stmt, threads: set[tirx.Var]) -> tirx.Stmt:
    """A print's statements as one thread runs them that stands for all."""

    def drop(node: tirx.IfThenElse) -> tirx.Stmt | None:
        return node.then_case if _asks(node.condition, threads) else None

    return ir_transform(body, None, drop, ["tirx.IfThenElse"])


def mark_prints(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with every print under `PRINT_ATTR`."""
    if not prints(func.body):
        return func
    uses = _uses(func.body)
    threads = {bind.var for bind in nodes(func.body, tirx.Bind) if op_name(bind.value) == "tl.launch_thread_idx"}

    def mark(node: tirx.SeqStmt) -> tirx.Stmt:
        return sequence(_grouped(list(node.seq), uses, threads))

    body = ir_transform(func.body, None, mark, ["tirx.SeqStmt"])
    return func.with_body(ir_transform(body, _mark_lone, None, ["tirx.For", "tirx.IfThenElse", "tirx.AttrStmt"]))


def _mark_lone(node: tirx.Stmt) -> tirx.Stmt | None:
    """A loop or a branch that holds nothing but a print has it marked; what is marked is left alone."""
    if is_print(node):
        return node
    if isinstance(node, tirx.For) and print_call(node.body) is not None:
        body = _marked([node.body])
        return loop_like(node, node.extent, body)
    if isinstance(node, tirx.IfThenElse) and node.else_case is None and print_call(node.then_case) is not None:
        return tirx.IfThenElse(node.condition, _marked([node.then_case]), None)
    return None


def _grouped(stmts: list[tirx.Stmt], uses: dict[object, int], threads: set[tirx.Var]) -> list[tirx.Stmt]:
    done: list[tirx.Stmt] = []
    for stmt in stmts:
        if not _is_print_shape(stmt, threads):
            done.append(stmt)
            continue
        group = [stmt]
        if done and isinstance(done[-1], tirx.Bind) and _only_use(done[-1].var, stmt, uses):
            bind = done.pop()
            group = [substitute(stmt, {bind.var: bind.value})]
        elif done and (staged := _staged(done[-1])) is not None and _only_use(staged, stmt, uses, besides=1):
            group.insert(0, done.pop())
        done.append(_marked(group))
    return done


def _is_print_shape(stmt: tirx.Stmt, threads: set[tirx.Var]) -> bool:
    """Whether the statement is a print's call, with the thread's test and the loop that TileLang puts around it."""
    while True:
        if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None and _asks(stmt.condition, threads):
            stmt = stmt.then_case
        elif isinstance(stmt, tirx.For) and _prints_elements(stmt):
            return True
        else:
            return print_call(stmt) is not None


def _asks(condition: tirx.PrimExpr, threads: set[tirx.Var]) -> bool:
    return bool(threads.intersection(tirx.analysis.undefined_vars(condition)))


def _prints_elements(loop: tirx.For) -> bool:
    call = print_call(loop.body)
    return call is not None and call.args[0].value == "debug_print_buffer_value"


def _staged(stmt: tirx.Stmt) -> tirx.Buffer | None:
    """The on-chip buffer that a copy fills."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    if call is None or op_name(call) != "tl.tileop.copy":
        return None
    buffer = call.args[1].args[0].buffer
    return buffer if buffer.scope() != "global" else None


def _only_use(what: object, stmt: tirx.Stmt, uses: dict[object, int], besides: int = 0) -> bool:
    here = _uses(stmt).get(what, 0)
    return here > 0 and uses.get(what, 0) == here + besides


def _uses(stmt: tirx.Stmt) -> dict[object, int]:
    """How often every variable and every buffer is read or written."""
    uses = nodes(stmt, tirx.Var, tirx.BufferLoad, tirx.BufferStore, tirx.AllocBuffer, tirx.DeclBuffer)
    return Counter(node if isinstance(node, tirx.Var) else node.buffer for node in uses)


def prints(body: tirx.Stmt) -> bool:
    """Whether anything in the statement prints."""
    return any(print_call(node) is not None for node in nodes(body, tirx.Evaluate))


def _marked(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    return tirx.AttrStmt(tirx.IntImm("int32", 0), PRINT_ATTR, tirx.IntImm("int32", 0), sequence(stmts))
