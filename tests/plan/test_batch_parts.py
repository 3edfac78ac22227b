"""What parts of a batch make of a function's results: told by the rules, and by torch on the batch and on its parts."""

import pytest
import torch
from torch.nn import functional as F
from tvm import relax
from tvm.script import tirx as T

import mesh_tensor as mt
from mesh_tensor.plan.batch_kinds import Fixed, Mean, Mixed, Rows, Sum
from mesh_tensor.plan.batch_parts import batch_parts
from tests.plan.step_modules import call, module

W, B = torch.randn(6, 6), torch.randn(6)


class Functions(torch.nn.Module):
    """Functions of rows and labels."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, y):
        return tuple(function(x, y) for function in self.functions)


def parts_of(*functions, rows=4, **options):
    x, y = torch.randn(rows, 5, 6), torch.randint(6, (rows, 5))
    module = mt.from_torch(torch.export.export(Functions(functions), (x, y)))
    return batch_parts(module.mod, "main", ("x", "y"), **options)


def heads(x):
    """As attention takes heads apart: (rows, positions, heads * 2) -> (rows, heads, positions, 2)."""
    return x.reshape(x.shape[0], 5, 3, 2).permute(0, 2, 1, 3)


def picked(x, table):
    """A table of (rows, positions) by the numbers of rows and positions, as attention masks are made."""
    return table[torch.arange(x.shape[0])[:, None], torch.arange(5)[None]]


def documents(x, dim):
    """Which positions are of one document, by where their numbers jump, as transformers tells packed sequences."""
    numbers = torch.arange(5).expand(x.shape[0], 5)
    jumps = numbers != torch.cat([numbers[:, :1] - 1, numbers], 1)[:, :-1] + 1
    number = jumps.to(torch.int64).cumsum(dim)
    return (number[:, None] == number[:, :, None]).float() * (number[:, None] + 1)


ROWS = {
    "linear": lambda x, y: F.linear(x, W, B),
    "softmax of others": lambda x, y: x.softmax(1),
    "taken apart and put together": lambda x, y: heads(x).permute(0, 2, 1, 3).reshape(x.shape[0], 5, 6),
    "rows and positions in one dim": lambda x, y: F.linear(x.flatten(0, 1), W),
    "attention": lambda x, y: heads(x) @ heads(x).transpose(-1, -2),
    "sequence first and back": lambda x, y: (
        torch.tanh(x.transpose(0, 1)).reshape(5, -1).reshape(5, -1, 6).transpose(0, 1)
    ),
    "embedding": lambda x, y: F.embedding(y, W) + x,
    "constants of one row": lambda x, y: x * torch.ones(1, 5, 1) + torch.arange(6.0),
    "mask of zeros": lambda x, y: torch.where(y[..., None] > 2, x, torch.zeros_like(x)),
    "without a dim": lambda x, y: x.sum(1).unsqueeze(1).squeeze(1),
    "a slice of others": lambda x, y: x[:, 1:, 0],
    "constants of all rows": lambda x, y: x + picked(x, torch.arange(5.0).expand(x.shape[0], 5))[..., None],
    "joined constants of all rows": lambda x, y: x + documents(x, 1).sum(-1, keepdim=True),
    "stacked": lambda x, y: torch.stack([x, x.tanh(), y[..., None] * x]).amax(0),
    "stacked behind": lambda x, y: torch.stack([x, x.tanh()], 1).flatten(1, 2) @ W,
    "one behind the other": lambda x, y: torch.cat([x, 2 * x]).tanh().reshape(2, -1, 5, 6).prod(0),
    "gathered": lambda x, y: x.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1),
}
SUMS = {
    "all": lambda x, y: x.sum(),
    "of rows": lambda x, y: x.sum(0) * B - 2 * x.sum(0),
    "of products": lambda x, y: x.flatten(0, 1).T @ x.flatten(0, 1),
    "of stacks": lambda x, y: torch.stack([x, x.tanh()]).sum((0, 1)) * B,
    "of pairs": lambda x, y: torch.einsum("bij,bkj->ik", x, x),
    "a count": lambda x, y: (y != 3).sum().float(),
    "after strides": lambda x, y: x.transpose(0, 1).flatten().sum(),
    "cross entropy": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
}
MEANS = {
    "all": lambda x, y: x.mean(),
    "of rows": lambda x, y: 3 * x.mean(0) + B,
    "with a penalty": lambda x, y: (x * x).mean() + 0.1 * (W * W).sum(),
    "of means": lambda x, y: x.mean(-1).mean(1).mean(0) / 7,
}


@pytest.mark.parametrize(("functions", "kind"), [(ROWS, Rows), (SUMS, Sum), (MEANS, Mean)])
def test_what_follows_from_parts(functions, kind):
    """By torch: on a batch of 8 rows, and on its halves."""
    parts = parts_of(*functions.values())
    x, y = torch.randn(8, 5, 6), torch.randint(6, (8, 5))
    assert (parts.totals, parts.shares) == ((), {})
    for (name, function), found in zip(functions.items(), parts.kinds, strict=True):
        assert isinstance(found, kind), f"{name}: {found}"
        one, other = function(x[:4], y[:4]), function(x[4:], y[4:])
        made = {Rows: torch.cat([one, other]) if one.ndim else None, Sum: one + other, Mean: (one + other) / 2}[kind]
        torch.testing.assert_close(made, function(x, y), rtol=1e-5, atol=1e-5, msg=name)
        assert found == Rows(0, 1, 4) or kind is not Rows


MIXED = [
    (lambda x, y: x - x.mean(0), "(subtract) takes rows of the batch and lv"),
    (lambda x, y: x.softmax(0), "(nn.softmax) needs the batch's rows together"),
    (lambda x, y: x.amax(), "(max) needs the batch's rows together"),
    (lambda x, y: x.sum().exp(), "(exp) is not linear in lv"),
    (lambda x, y: x.sum() * x.mean(), "(multiply) takes sums and means over the batch's rows together"),
    (lambda x, y: x.sum() + x.mean() * 0 + torch.tensor(2.0), "which is the same for all rows"),
    (lambda x, y: x.cumsum(0), "needs the batch's rows together"),
    (lambda x, y: x[0], "needs the batch's rows together"),
    (lambda x, y: x.flip(0), "needs the batch's rows together"),
    (lambda x, y: x @ x.flatten(0, 1).T, "needs the batch's rows together"),
    (lambda x, y: x + torch.arange(4.0)[:, None, None], "which has as many as one microbatch"),
    (
        lambda x, y: x + picked(x, torch.arange(x.shape[0] * 5.0).reshape(-1, 5))[..., None],
        "which has as many as one microbatch",
    ),
    (  # the number of a row, as a position
        lambda x, y: x + torch.arange(5.0).expand(4, 5)[torch.arange(4)[:, None], torch.arange(4)[:, None]][..., None],
        "which has as many as one microbatch",
    ),
    (lambda x, y: x + (documents(x, 0) + 1).cumsum(0).sum(-1, keepdim=True), "which has as many as one microbatch"),
    (lambda x, y: x.reshape(2, 2, 5, 6).sum(0), "regroups dims so that it is not known"),
    (lambda x, y: torch.cat([x, x[:2]]), "needs the batch's rows together"),
    (lambda x, y: torch.cat([x, torch.ones(4, 5, 6)]), "needs the batch's rows together"),
    (lambda x, y: torch.stack([x, -x]).reshape(2, -1, 6).transpose(0, 1).softmax(0), "needs the batch's rows together"),
    (lambda x, y: torch.cat([x, x])[::2], "needs the batch's rows together"),
    (lambda x, y: x.sum() / 4, "divides a sum by 4, which may be a constant"),
    (lambda x, y: x.sum() * (1 / 20), "divides a sum by 20, which may be a constant"),
    (lambda x, y: x.sum() / torch.ones(4).sum(), "divides a sum by 4"),
    (lambda x, y: (x.sum(0) > 0).float(), "is not linear"),
    (lambda x, y: torch.einsum("bij,bkj->ik", x, x).softmax(0), "is not linear"),
]


def test_what_does_not_follow_from_parts():
    parts = parts_of(*(function for function, _ in MIXED), trained=["x"])  # no totals
    for (_, why), kind in zip(MIXED, parts.kinds, strict=True):
        assert isinstance(kind, Mixed), why
        assert why in kind.why


def test_stacks_of_one_row():
    """(2, 5, 6) as (2, 1, 5, 6): the row may be in either dim, unless a stack says in which."""

    def rows(*x):
        return torch.cat(x).unflatten(0, (len(x), -1)).mean(0).sum()

    joined = lambda x, y: rows(x, x.tanh()), lambda x, y: rows(x)
    for kind in parts_of(*joined, rows=1).kinds:
        assert isinstance(kind, Mixed)
        assert "puts a dim behind the only row" in kind.why
    stacks = lambda x, y: torch.stack([x, x.tanh()]).mean(0).sum(), lambda x, y: torch.stack([x]).mean(0).sum()
    for found in (parts_of(*joined, rows=2), parts_of(*stacks, rows=1), parts_of(*stacks, rows=2)):
        assert all(isinstance(kind, Sum) for kind in found.kinds)


def test_what_is_unstacked_has_its_rows_where_they_were():
    """Also one row alone: (3, 1, 5, 2) as three of (1, 5, 2)."""

    def product(x, y):
        q, k, v = x.reshape(-1, 5, 3, 2).permute(2, 0, 1, 3).unbind(0)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

    for rows in (1, 2, 4):
        assert parts_of(product, rows=rows).kinds == (Rows(0, 1, rows),)
    (kind,) = parts_of(lambda x, y: x.squeeze(0).softmax(0), rows=1).kinds
    assert isinstance(kind, Mixed)


def test_row_numbers_are_none_of_positions():
    """As many rows as positions."""

    def table():
        return torch.arange(5.0).expand(5, 5)

    right, wrong = parts_of(
        lambda x, y: x + picked(x, table())[..., None], lambda x, y: x + picked(x, table().T)[..., None], rows=5
    ).kinds
    assert right == Rows(0, 1, 5)
    assert isinstance(wrong, Mixed)


def test_what_depends_on_no_input_is_the_same_for_all():
    (kind,) = parts_of(lambda x, y: W.sum(0) * 2).kinds
    assert kind == Fixed(frozenset({0}))


@pytest.mark.parametrize(("said", "kind"), [("sum", Sum), ("mean", Mean)])
def test_a_quotient_is_what_it_is_said_to_be(said, kind):
    parts = parts_of(lambda x, y: x.sum() / 20, lambda x, y: x.sum() * 0.25, quotients=said)
    assert [type(found) for found in parts.kinds] == [kind] * 2


def test_one_row_per_part():
    names = ("linear", "rows and positions in one dim", "attention")
    *kinds, mixed = parts_of(*map(ROWS.get, names), lambda x, y: x.transpose(0, 1).flatten(), rows=1).kinds
    assert kinds == [Rows(0, 1, 1)] * 3
    assert isinstance(mixed, Mixed)


def test_totals_stand_for_sums_that_are_not_trained():
    def loss(x, y):
        return F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=2)

    parts = parts_of(loss, trained=["x"])
    assert [type(kind) for kind in parts.kinds] == [Sum]
    (total,) = parts.totals
    assert total.kind == Sum(20)
    assert [var.name_hint for var in parts.mod["main"].params] == ["x", "y", total.name]
    used = [line for line in str(parts.mod).splitlines() if total.name in line]
    assert "R.divide" in used[1]
    assert isinstance(parts_of(loss, trained=["x", "y"]).kinds[0], Mixed)


def test_means_are_added_to_sums_in_shares():
    parts = parts_of(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) + x.mean(), trained=["x"])
    assert [type(kind) for kind in parts.kinds] == [Sum]
    assert parts.shares == {"batch_share": "float32"}


@T.prim_func
def rotated(A: T.Buffer((4, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j in T.grid(4, 6):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] * T.Cast("float32", vj)


@T.prim_func
def numbered(A: T.Buffer((4, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j in T.grid(4, 6):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] * T.Cast("float32", vi)


@T.prim_func
def averaged(A: T.Buffer((4, 6), "float32"), C: T.Buffer((6,), "float32")):
    for j, i in T.grid(6, 4):
        with T.sblock("C"):
            vj, vi = T.axis.remap("SR", [j, i])
            with T.init():
                C[vj] = T.float32(0)
            C[vj] = C[vj] + A[vi, vj] * T.float32(0.25)


@pytest.mark.parametrize(
    ("kernel", "shape", "kind"), [(rotated, (4, 6), Rows), (numbered, (4, 6), Mixed), (averaged, (6,), Mixed)]
)
def test_kernels(kernel, shape, kind):
    (found,) = batch_parts(module({"x": (4, 6)}, [("y", call(kernel, "x", shape=shape))]), "main", ["x"]).kinds
    assert isinstance(found, kind), found
    assert kind is Rows or "sums over the batch's rows, or computes with their numbers" in found.why


@T.prim_func
def bordered(A: T.Buffer((4, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j in T.grid(4, 6):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.if_then_else(vi < 3, A[vi + 1, vj], T.float32(0))


@T.prim_func
def summed(A: T.Buffer((4, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j, k in T.grid(4, 6, 4):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            if vk <= vi:
                C[vi, vj] = C[vi, vj] + A[vk, vj]


@pytest.mark.parametrize(("kernel", "kind"), [(rotated, Rows), (numbered, Mixed), (bordered, Mixed), (summed, Mixed)])
def test_kernels_on_what_is_the_same_for_all_rows(kernel, kind):
    """What a kernel makes of the same in all rows is the same only where it doesn't mind which row it is in."""
    ones = ("ones", lambda builder, env: relax.op.ones((4, 6), "float32"))
    total = ("y", lambda builder, env: relax.op.add(env["x"], env["made"]))
    steps = [ones, ("made", call(kernel, "ones", shape=(4, 6))), total]
    (found,) = batch_parts(module({"x": (4, 6)}, steps), "main", ["x"]).kinds
    assert isinstance(found, kind), found
    assert kind is Rows or "which has as many as one microbatch" in found.why


@pytest.mark.parametrize("size", [4, 6])
def test_kernels_that_are_others_for_more_rows(size):
    """One sums as many ones as a part has rows, the other one always six."""

    def made(rows):
        count = rows if size == 4 else 6

        @T.prim_func
        def total(A: T.Buffer((count,), "float32"), C: T.Buffer((1,), "float32")):
            for i in range(count):
                with T.sblock("C"):
                    vi = T.axis.remap("R", [i])
                    with T.init():
                        C[0] = T.float32(0)
                    C[0] = C[0] + A[vi]

        ones = ("ones", lambda builder, env: relax.op.ones((count,), "float32"))
        result = ("y", lambda builder, env: relax.op.add(env["x"], env["made"]))
        return module({"x": (rows, 6)}, [ones, ("made", call(total, "ones", shape=(1,))), result])

    (found,) = batch_parts(made(4), "main", ["x"], larger=made(8)).kinds
    assert isinstance(found, Rows if size == 6 else Mixed), found


def test_values_that_are_used_twice_are_looked_at_once():
    """Layers with residual connections: 2^60 ways lead from the result to the input."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorStructInfo((4, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(60):
                value = builder.emit(relax.op.add(value, value))
            loss = builder.emit_output(relax.op.divide(relax.op.sum(value), relax.const(12.0)))
        builder.emit_func_output(loss)
    assert batch_parts(builder.get(), "main", ["x"], quotients="mean").kinds == (Mean(),)
