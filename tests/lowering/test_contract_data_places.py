"""Places that data names: pages of a table, bins on chip, slots that are bound to variables."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.paged import (
    paged_attention,
    paged_attention_reference,
    paged_latent_attention,
    paged_latent_attention_reference,
    staged_histogram,
)
from mesh_tensor.rules.kernel.finite_blocks import _without_loads
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.tir.nodes import loads
from tests.other_machines import machine

from .every_layout import check
from .support import assert_right, lowered, only_kernel, outline, run, text

PAGES = {"K": {"x": 0}, "V": {"x": 0}}
TABLES = {
    "inside": torch.tensor([[0, 6, 2], [5, 5, 1], [3, 4, 0]]).int(),
    "outside": torch.tensor([[0, -1, 7], [6, -9, 100], [2, 4, -3]]).int(),
}
LENGTHS = torch.tensor([12, 5, 8]).int()


def attention_inputs(table):
    return [torch.randn(3, 2, 5), torch.randn(7, 4, 5), torch.randn(7, 4, 5), table, LENGTHS]


@pytest.mark.parametrize(("table", "devices"), [("inside", 2), ("outside", 3)])
def test_pages(table, devices):
    """7 pages on 2 or 3 devices; what is no page is 0, on one of them."""
    func, inputs = paged_attention(3, 2, 7, 3, 5, page=4), attention_inputs(TABLES[table])
    steps = outline(lowered(func, {"x": devices}, PAGES, strict=True))
    assert not [step for step in steps if step.startswith("all_gather(K")]
    assert_right(func, {"x": devices}, PAGES, inputs, paged_attention_reference, rtol=1e-5, atol=1e-5)


def test_a_device_walks_its_own_pages():
    local = text(lowered(paged_attention(3, 2, 8, 3, 5, page=4), {"x": 2}, PAGES, strict=True).steps[0].func)
    assert "7), 0) - x * 4 >= 0 and" in local
    assert "one_iteration" not in local


def latent_attention(count, more=0):
    """Pages of 4 rows, `count` of them, and what it is called with: of the last page nothing is read, or `more`."""
    lengths = torch.tensor([8, 5, 1]).int()
    inputs = [torch.randn(3, 2, 5), torch.randn(4 * count, 5), TABLES["inside"] % count, lengths]
    return paged_latent_attention(3, 2, count, 3, 5, page=4, more=more), inputs


def latent_reference(*inputs):
    return paged_latent_attention_reference(*inputs, page=4)


@pytest.mark.parametrize(("count", "devices"), [(8, 2), (7, 3)])
def test_pages_that_lie_one_after_the_other_in_rows(count, devices):
    """What is masked is said first, of rows whose number is bound: all the same, every page has a row that counts."""
    func, inputs = latent_attention(count)
    layouts = {"KV": {"x": 0}}
    with machine(1):
        steps = outline(lowered(func, {"x": devices}, layouts))
        if count == 8:
            assert not [step for step in steps if step.startswith("all_gather(KV")]
        assert_right(func, {"x": devices}, layouts, inputs, latent_reference, rtol=1e-5, atol=1e-5)


def test_pages_of_which_nothing_counts_are_gathered():
    """A device that has seen nothing else would start from what is nothing."""
    func, inputs = latent_attention(8, more=1)
    with machine(1):
        assert outline(lowered(func, {"x": 2}, {"KV": {"x": 0}}))[0].startswith("all_gather(KV")
        assert_right(func, {"x": 2}, {"KV": {"x": 0}}, inputs, latent_reference, rtol=1e-5, atol=1e-5)


def test_what_is_bound_is_told_by_what_stays_alone():
    """A bound that was read on chip, or of a parameter that the kernel writes, may be another by then."""

    @T.prim_func
    def kernel(lengths: T.Tensor((3,), "int32"), counts: T.Tensor((3,), "int32"), Y: T.Tensor((3,), "int32")):
        with T.Kernel(3, threads=32) as bx:
            left = T.alloc_local((1,), "int32")
            left[0] = lengths[bx]
            stays = lengths[bx] + 1
            on_chip = left[0] + 1
            written = counts[bx] + 1
            left[0] = 0
            counts[bx] = 0
            Y[bx] = on_chip + written + left[0] + counts[bx]
            for k in T.serial(stays):
                if stays - k > 2:
                    Y[bx] += k

    read = read_kernel(normalize(kernel))
    told = {var.name: _without_loads([var], read)[0] for var in read.binds}
    assert {name for name, expr in told.items() if not isinstance(expr, tirx.Var)} == {"stays"}
    assert not loads(told["stays"])


@pytest.mark.parametrize("devices", [2, 3])
def test_bins_on_chip(devices):
    ids, counts = torch.randint(0, 7, (37,)).int(), torch.randint(0, 9, (7,)).int()
    func, bins = staged_histogram(37, 7), {"counts": {"x": 0}}
    assert outline(lowered(func, {"x": devices}, bins, strict=True)) == ["kernel(ids, counts)"]
    expected = counts + torch.bincount(ids, minlength=7).int()
    assert torch.equal(run(func, {"x": devices}, bins, ids, counts), expected)


def gathered(body, name="K"):
    """What `body` makes, for every row, of the pages that a table names."""

    @T.prim_func
    def kernel(K: T.Tensor((7, 4, 5), "float32"), table: T.Tensor((3, 3), "int32"), Y: T.Tensor((3, 4, 5), "float32")):
        with T.Kernel(3, threads=32) as bx:
            page = T.alloc_shared((4, 5), "float32")
            total = T.alloc_fragment((4, 5), "float32")
            T.clear(total)
            for k in T.serial(3):
                body(K, table, page, total, bx, k)
            T.copy(total, Y[bx, 0, 0])

    return kernel


def pages(k, table):
    """The pages that the table names: 0 where there is none."""
    inside = (table >= 0) & (table < 7)
    return k[table.clamp(0, 6).long()] * inside[..., None, None]


@T.macro
def largest(K, table, page, total, bx, k):
    T.copy(K[table[bx, k], 0, 0], page)
    for i, j in T.Parallel(4, 5):
        total[i, j] = T.max(total[i, j], page[i, j] - 1.0)


@T.macro
def under_a_condition(K, table, page, total, bx, k):
    number = table[bx, k]
    if number >= 0 and number < 7:
        T.copy(K[number, 0, 0], page)
        for i, j in T.Parallel(4, 5):
            total[i, j] = T.max(total[i, j], page[i, j] - 1.0)


@T.macro
def by_elements(K, table, page, total, bx, k):
    number = table[bx, k]
    for i, j in T.Parallel(4, 5):
        total[i, j] = T.max(total[i, j], K[number, i, j] * number)


@T.macro
def the_last(K, table, page, total, bx, k):
    T.copy(K[table[bx, k], 0, 0], page)
    for i, j in T.Parallel(4, 5):
        total[i, j] = page[i, j]


@T.macro
def and_the_next(K, table, page, total, bx, k):
    T.copy(K[table[bx, k], 0, 0], page)
    for i, j in T.Parallel(4, 5):
        total[i, j] = T.max(total[i, j], page[i, j] - K[table[bx, (k + 1) % 3], i, j])


def _largest(k, table):
    return (pages(k, table) - 1).amax(1).clamp(min=0)


def _seen(k, table):
    inside = ((table >= 0) & (table < 7))[..., None, None]
    return torch.where(inside, pages(k, table) - 1, -torch.inf).amax(1).clamp(min=0)


def _products(k, table):
    return (pages(k, table) * table[..., None, None]).amax(1).clamp(min=0)


@pytest.mark.parametrize(
    ("body", "reference"),
    [(largest, _largest), (under_a_condition, _seen), (by_elements, _products)],
    ids=["copied", "under a condition", "loaded"],
)
def test_what_is_made_of_pages(body, reference):
    k, table = torch.randn(7, 4, 5), TABLES["outside"]
    with machine(1):
        steps = outline(lowered(gathered(body), {"x": 2}, {"K": {"x": 0}}))
        assert steps == ["kernel(K, table, Y)", "all_reduce(Y, max, x)"]
        check(gathered(body), [k, table], reference(k, table), [{"x": 3}])


def test_pages_are_gathered_where_parts_can_not_be_combined():
    k, table = torch.randn(7, 4, 5), TABLES["outside"]
    assert "all_gather(K, dim 0, x)" in outline(lowered(gathered(and_the_next), {"x": 2}, {"K": {"x": 0}}))
    expected = (pages(k, table) - pages(k, table.roll(-1, 1))).amax(1).clamp(min=0)
    check(gathered(and_the_next), [k, table], expected, [{"x": 2}])
    check(gathered(the_last), [k, table], pages(k, table)[:, -1], [{"x": 2}])


def counted(body):
    """What `body` makes, on chip, of numbers that say where."""

    @T.prim_func
    def kernel(ids: T.Tensor((20,), "int32"), C: T.Tensor((7,), "float32"), out: T.Tensor((20,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_shared((7,), "float32")
            some = T.alloc_shared((5,), "int32")
            T.clear(own)
            T.clear(out)
            for block in T.serial(4):
                T.copy(ids[block * 5], some)
                body(own, some, out, block)
            T.copy(own, C)

    return kernel


@T.macro
def staged(own, some, out, block):
    for i in T.serial(5):
        own[some[i]] += 1.0


@T.macro
def last_one(own, some, out, block):
    for i in T.serial(5):
        own[some[i]] = T.cast(block * 5 + i, "float32")


@T.macro
def neighbours_too(own, some, out, block):
    for i in T.serial(5):
        own[some[i]] += 1.0
        own[(some[i] + 1) % 7] -= 0.5


@T.macro
def ranks(own, some, out, block):
    for i in T.serial(5):
        out[block * 5 + i] = own[some[i]]
        own[some[i]] += 1.0


@T.macro
def changing_places(own, some, out, block):
    for i in T.serial(5):
        some[i] = (some[i] + 1) % 7
        own[some[i]] += 1.0


def _reference(name, ids):
    own, seen = torch.zeros(7), torch.zeros(20)
    for at, number in enumerate(ids.tolist()):
        seen[at] = own[number] if name == "ranks" else 0
        if name == "changing places":
            number = (number + 1) % 7
        own[number] = at if name == "last one" else own[number] + 1
        if name == "neighbours too":
            own[(number + 1) % 7] -= 0.5
    return own, seen


@pytest.mark.parametrize(
    ("name", "body", "is_split"),
    [
        ("staged", staged, True),
        ("last one", last_one, True),
        ("neighbours too", neighbours_too, False),
        ("ranks", ranks, False),
        ("changing places", changing_places, False),
    ],
)
def test_bins_that_are_updated(name, body, is_split):
    ids = torch.randint(0, 7, (20,)).int()
    func = counted(body)
    assert ("slice(C" in " ".join(outline(lowered(func, {"x": 2}, {"C": {"x": 0}})))) != is_split
    got = run(func, {"x": 2}, {"C": {"x": 0}}, ids)
    for value, expected in zip(got, _reference(name, ids), strict=True):
        torch.testing.assert_close(value, expected)
    check(func, [ids], list(_reference(name, ids)), [{"x": 3}])


def test_slots_that_are_bound_to_a_variable():
    """A cache's row that lies elsewhere is the other device's."""

    @T.prim_func
    def kernel(new: T.Tensor((6, 5), "float32"), slots: T.Tensor((6,), "int32"), cache: T.Tensor((7, 2, 5), "float32")):
        with T.Kernel(6, threads=32) as t:
            slot = slots[t]
            if slot >= 0:
                for j in T.Parallel(5):
                    cache[slot // 2, slot % 2, j] = new[t, j]

    new, slots, cache = torch.randn(6, 5), torch.tensor([3, 13, -1, 0, 8, 7]).int(), torch.randn(7, 2, 5)
    expected = cache.clone().flatten(0, 1)
    expected[slots[slots >= 0].long()] = new[slots >= 0]
    rows = {"cache": {"x": 0}}
    assert only_kernel(lowered(kernel, {"x": 2}, rows, strict=True)) is not None
    torch.testing.assert_close(run(kernel, {"x": 2}, rows, new, slots, cache), expected.view(7, 2, 5))
