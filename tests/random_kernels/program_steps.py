"""Steps of random programs: what scalar code does along the positions of a row."""

from __future__ import annotations

from collections.abc import Callable

from .program_scene import Program


def elements(p: Program) -> None:
    """An output, position by position, maybe not everywhere, maybe in any order."""
    name = p.array("mn", "inout", fresh=p.chance(70))
    at_once = p.chance(50)
    p.hidden = {name} if at_once else set()
    headers = [f"for j in {'T.Parallel' if at_once else 'T.serial'}({p.n})"]
    place = f"{name}[{p.place('mn', 'j')}]"
    with p.block(*headers):
        value = p.value("j")
        if p.chance(40):
            with p.block(f"if {p.condition('j')}"):
                p.emit(f"{place} = {value}")
            if p.chance(60):
                with p.block("else"):
                    p.emit(f"{place} = {p.pick((p.value('j', 1), f'{place} + {p.const(1)}'))}")
        else:
            p.emit(p.pick((f"{place} = {value}", f"{place} += {value}", f"{place} = {value} - {place}")))
            if p.chance(25):
                p.emit(f"{place} = T.max({place}, {p.value('j', 1)})")
    p.hidden = set()


def reduction(p: Program) -> None:
    """A variable that combines values, or keeps one of them; then it is stored, or used."""
    v = p.variable(p.dtype, p.const(p.pick((0, 0, 1, -3))), carried=p.chance(30))
    kind = p.pick(("sum", "sum", "max", "min", "last", "first", "minus", "two"))
    with p.block(f"for j in {_positions(p)}"):
        value = p.value("j", 1)
        condition = [f"if {p.condition('j')}"] if p.chance(50) or kind in ("last", "first") else []
        if kind == "first":
            found = p.variable("int32", "0")
            condition = [f"if {found} == 0 and {p.condition('j')}"]
        update = {"sum": f"{v} += {value}", "minus": f"{v} = {value} - {v}", "two": f"{v} -= {value}"}
        update |= {op: f"{v} = T.{op}({v}, {value})" for op in ("max", "min")}
        with p.block(*condition):
            p.emit(update.get(kind, f"{v} = {value}"))
            if kind == "first":
                p.emit(f"{found} = j + 1")
        if kind == "two" and condition:
            with p.block("else"):
                p.emit(f"{v} = {p.pick((f'T.max({v}, {value})', f'{v} + {p.const(1)}'))}")
    _use(p, v)


def _use(p: Program, v: str) -> None:
    if p.chance(60):
        p.emit(f"{p.array('m', 'inout', fresh=True)}[{p.place('m', '')}] = {v}")
    if p.chance(30):
        with p.block(f"if {v} > {p.const(p.pick((0, 2)))}"):
            elements(p)


def _positions(p: Program) -> str:
    """A loop over positions: all of them, or as many as something says."""
    kind = p.pick(("all",) * 6 + ("from", "loaded", "loaded", "counted"))
    if kind == "from" and p.n > 1:
        return f"T.serial(1, {p.n})"
    if kind == "loaded":
        ids = p.array(p.pick(("m", "")), "in", "int32", p.n)
        return f"T.serial({p.element(ids, '')})"
    whole = [v for v, (dtype, _) in p.variables.items() if dtype == "int32"]
    if kind == "counted" and whole:
        return f"T.serial(T.max(T.min({p.pick(whole)}, {p.n}), 0))"
    return f"T.serial({p.n})"


def running(p: Program) -> None:
    """Every position stores what has been combined so far."""
    v = p.variable(p.dtype, p.const(0), carried=p.chance(30))
    name = p.array("mn", "inout", fresh=True)
    with p.block(f"for j in T.serial({p.n})"):
        text = p.pick((f"{v} + {{}}", f"T.max({v}, {{}})", f"{{}} - {v}", f"T.if_then_else({{}} > {v}, {{}}, {v})"))
        p.emit(f"{v} = " + text.replace("{}", p.value("j", 1)), f"{name}[{p.place('mn', 'j')}] = {v}")


def compaction(p: Program) -> None:
    """What passes a test moves to the front."""
    n = p.variable("int32", "0", carried=p.chance(20))
    source, name = p.value("j", 1), p.array("mn", "inout", fresh=True)
    room = f" and {n} < {p.n}" if n in p.carried else ""
    with p.block(f"for j in T.serial({p.n})", f"if {p.condition('j')}{room}"):
        p.emit(f"{name}[{p.place('mn', n)}] = {source}", f"{n} += 1")
    if p.chance(60):
        p.emit(f"{p.array('m', 'inout', 'int32', fresh=True)}[{p.place('m', '')}] = {n}")


def previous(p: Program) -> None:
    """The same with a counter in memory, and atomics that give the old value."""
    count = p.array("m", "inout", "int32", fresh=True)
    name = p.array("mn", "inout", fresh=True)
    here = f"{count}[{p.place('m', '')}]"
    q = p.variable("int32", "0")
    with p.block(f"for j in T.serial({p.n})", f"if {p.condition('j')}"):
        p.emit(f"{q} = T.atomic_{p.pick(('add', 'add', 'max'))}({here}, {p.pick((1, 2))}, return_prev=True)")
        with p.block(f"if {q} >= 0 and {q} < {p.n}"):
            p.emit(f"{name}[{p.place('mn', q)}] = {p.value('j', 1)}")


def histogram(p: Program) -> None:
    """Counts or sums by loaded or computed places, in memory or on chip."""
    size = p.pick((p.n, p.n, 4))
    value = p.value("j", 1)
    ids = p.array(p.pick(("mn", "n")), "in", "int32", size)
    place = p.pick((p.element(ids, "j"), p.element(ids, f"{p.n - 1} - j"), f"j % {size}", "j // 2"))
    place = place if place != "j // 2" or (p.n + 1) // 2 <= size else f"j % {size}"
    op = p.pick(("{0} += {1}", "T.atomic_add({0}, {1})", "T.atomic_max({0}, {1})", "{0} = T.max({0}, {1})"))
    condition = [f"if {p.condition('j')}"] if p.chance(30) else []
    if size == p.n and (not p.one_lane or p.chance(40)):
        name = p.array("mn", "inout", fresh=True)
        with p.block(f"for j in T.serial({p.n})", *condition):
            p.emit(op.format(f"{name}[{p.place('mn', place)}]", value))
        return
    if not p.one_lane:
        return
    table = p.on_chip(size)
    p.emit(f"T.fill({table}, {p.const(p.pick((0, 0, 2)))})")
    with p.block(f"for j in T.serial({p.n})", *condition):
        p.emit(op.format(f"{table}[{place}]", value))
    if size == p.n:
        out = p.array("mn", "inout", fresh=True)
        with p.block(f"for j in {p.pick(('T.Parallel', 'T.serial'))}({size})"):
            p.emit(f"{out}[{p.place('mn', 'j')}] = {table}[{p.pick(('j', f'{size - 1} - j'))}]")
    else:
        total = p.variable(p.dtype, p.const(0))
        p.emit(f"{total} = {table}[0] + {table}[3]")
        _use(p, total)


def shared_histogram(p: Program) -> None:
    """Atomics of all rows into one array."""
    name = p.array("n", "inout", "int32", fresh=True)
    op = p.pick(("add", "add", "max", "min"))
    with p.block(f"for j in T.serial({p.n})", *([f"if {p.condition('j')}"] if p.chance(40) else [])):
        p.emit(f"T.atomic_{op}({name}[{p.index('j')}], {p.pick((1, p.index('j'), 'j'))})")


def scatter(p: Program) -> None:
    """Stores at loaded places, in order: the last one stays."""
    name = p.array("mn", "inout", fresh=p.chance(60))
    with p.block(f"for j in T.serial({p.n})", *([f"if {p.condition('j')}"] if p.chance(30) else [])):
        p.emit(f"{name}[{p.place('mn', p.index('j'))}] = {p.value('j', 1)}")


def in_order(p: Program) -> None:
    """Every position builds on the one before."""
    if p.n < 2:
        return
    name = p.array("mn", "inout", fresh=p.chance(60))
    low, high, behind = p.pick(
        ((f"1, {p.n}", "j", "j - 1"), (str(p.n - 1), "j", "j + 1"), (str(p.n - 1), "j + 1", "j"))
    )
    here, there = (f"{name}[{p.place('mn', at)}]" for at in (high, behind))
    with p.block(f"for j in T.serial({low})"):
        p.emit(
            p.pick((f"{here} = {there} + {p.value('j', 0)}", f"{here} = T.max({there}, {here})", f"{here} -= {there}"))
        )


def exchange(p: Program) -> None:
    """A bubble pass, or a whole sort."""
    if p.n < 2:
        return
    name = p.array("mn", "inout", fresh=p.chance(60))
    t = p.variable(p.dtype, p.const(0))
    a, b = (f"{name}[{p.place('mn', at)}]" for at in ("j", "j + 1"))
    loops = p.pick(
        ([f"for j in T.serial({p.n - 1})"], [f"for q in T.serial({p.n - 1})", f"for j in T.serial({p.n - 1} - q)"])
    )
    with p.block(*loops, f"if {a} {p.pick(('>', '<'))} {b}"):
        p.emit(f"{t} = {a}", f"{a} = {b}", f"{b} = {t}")


def ranks(p: Program) -> None:
    """Sorting by counting how many are less."""
    source = p.array("mn")
    n, name = p.variable("int32", "0"), p.array("mn", "inout", fresh=True)
    order = p.array("mn", "inout", "int32", fresh=True)
    a, b = (f"{source}[{p.place('mn', at)}]" for at in ("j", "q"))
    with p.block(f"for j in T.serial({p.n})"):
        p.emit(f"{n} = 0")
        with p.block(f"for q in T.serial({p.n})", f"if {b} < {a} or ({b} == {a} and q < j)"):
            p.emit(f"{n} += 1")
        p.emit(
            *p.pick(
                (
                    [f"{name}[{p.place('mn', n)}] = {a}"],
                    [f"{order}[{p.place('mn', 'j')}] = {n}"],
                    [f"{order}[{p.place('mn', n)}] = j"],
                )
            )
        )


def early(p: Program) -> None:
    """Loops that are left, or whose iterations are given up."""
    name = p.array("mn", "inout", fresh=p.chance(70))
    store = f"{name}[{p.place('mn', 'j')}] = {p.value('j', 1)}"
    with p.block(f"for j in T.serial({p.n})"):
        lines = [store, None]
        p.random.shuffle(lines)
        for line in lines:
            if line is None:
                with p.block(f"if {p.condition('j')}"):
                    p.emit(p.pick(("T.loop_break()", "break", "continue")))
            else:
                p.emit(line)


def until(p: Program) -> None:
    """A while loop."""
    n = p.variable("int32", "0")
    name = p.array("mn", "inout", fresh=True)
    with p.block(f"while {n} < {p.n}" + (f" and {p.condition('')}" if p.chance(30) else "")):
        p.emit(f"{name}[{p.place('mn', n)}] = {p.value(n, 1)}", f"{n} = {n} + {p.pick((1, 2))}")


def tile(p: Program) -> None:
    """A row on chip: copied, changed, and copied back or reduced."""
    if not p.one_lane:
        return
    source, t = p.array("mn", p.pick(("in", "in", "inout"))), p.on_chip(p.n)
    p.emit(f"T.copy({source}[{p.place('mn', '0')}], {t})")
    p.hidden = {q.name for q in p.params.values() if q.role == "inout"}
    with p.block(f"for j in T.Parallel({p.n})", *([f"if {p.condition('j')}"] if p.chance(30) else [])):
        p.emit(f"{t}[j] = T.max({t}[j], {p.value('j', 1)})" if p.chance(50) else f"{t}[j] = {t}[j] + {p.value('j', 1)}")
    p.hidden = set()
    if p.chance(40):
        p.emit(f"T.cumsum({t}, dim=0)" if p.chance(30) and p.n > 1 else f"{t}[0] = {p.value('', 1)}")
    p.emit(f"T.copy({t}, {p.array('mn', 'inout', fresh=p.chance(70))}[{p.place('mn', '0')}])")


def looked_up(p: Program) -> None:
    """A row of a table, from where a variable says, copied before a sum and used after it; the variable may be another
    by then."""
    if not p.one_lane:
        return
    place, t, total = p.variable("int32", "0"), p.on_chip(p.n), p.variable(p.dtype, p.const(0))
    if p.chance(50):
        with p.block(f"for j in T.serial({p.n})", f"if {p.condition('j')}"):
            p.emit(f"{place} = j")
    else:
        ids = p.array("m", "in", "int32", p.n)
        with p.block(f"if {p.element(ids, '')} > {p.pick((0, 1))}"):
            p.emit(f"{place} = {p.element(ids, '')}")
    p.emit(f"T.copy({p.array('nn')}[{place}, 0], {t})")
    if p.chance(40):
        p.emit(f"{place} = {p.n - 1} - {place}")
    with p.block(f"for j in T.serial({p.n})"):
        p.emit(f"{total} += {p.element(p.array('mn', fresh=True), 'j') if p.chance(60) else p.value('j', 1)}")
    name = p.array("mn", "inout", fresh=True)
    with p.block(f"for j in T.Parallel({p.n})"):
        more = f" + {p.cast(place)}" if p.chance(40) else ""
        p.emit(f"{name}[{p.place('mn', 'j')}] = T.max({t}[j], {total}){more}")


STEPS: tuple[Callable[[Program], None], ...] = (
    *(elements,) * 4,
    *(reduction,) * 5,
    *(running,) * 2,
    *(compaction,) * 2,
    *(histogram,) * 3,
    *(tile,) * 2,
    *(looked_up,) * 2,
    previous,
    shared_histogram,
    scatter,
    in_order,
    exchange,
    ranks,
    early,
    until,
)
