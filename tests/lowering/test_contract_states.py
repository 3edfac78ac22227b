"""Clause 8: what a loop over blocks carries is combined where it is known to be a running maximum and sums scaled to
it, with what an expert would exchange; what only looks like that keeps its dim whole."""

import math

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from kernels.flash_attention import flash_attention, flash_attention_reference
from mesh_tensor.lowering.pipeline import lower_kernel
from tests.other_machines import machine

from .state_kernels import WRONG, log_sum, online, online_reference, smooth_maximum
from .support import outline


def compiled(func, mesh, layouts, **options):
    """For a machine on which operations are all that counts: states are combined, however small the tensors."""
    with machine(2):
        return mt.compile(
            mt.annotate(func, mt.Mesh(mesh), layouts), **{"target": "interpret", "poison": True, **options}
        )


def steps(func, mesh, layouts):
    """On a machine on which collectives start at once: bytes decide."""
    with machine(1):
        return outline(lower_kernel(mt.annotate(func, mt.Mesh(mesh), layouts)))


def alone(func, *inputs):
    """What the kernel gives on one device."""
    return mt.compile(mt.annotate(func, mt.Mesh({"x": 1}), {}), target="interpret")(*inputs)


def close(results, expected, tolerance=2e-5):
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def columns(*axes):
    return {"X": dict.fromkeys(axes, 1), "V": dict.fromkeys(axes, 0)}


def test_states_are_exchanged_and_not_what_they_are_made_of():
    assert steps(online(8, 1024, 16), {"x": 2}, columns("x")) == [
        "kernel(X, V, m_w1, m_own_w1, total_own_w1, acc_own_w1)",
        "all_reduce(m_w1, max, x)",
        "kernel(m_w1.1, m_own_w1, total_own_w1, acc_own_w1, total_w1, acc_w1)",
        "all_reduce(total_w1, sum, x)",
        "all_reduce(acc_w1, sum, x)",
        "kernel(Out, L, m_w1.1, total_w1.1, acc_w1.1)",
    ]


def test_results_on_the_same_axis_are_reduce_scattered():
    made = steps(online(8, 1024, 16), {"x": 2}, {**columns("x"), "Out": {"x": 0}, "L": {"x": 0}})
    assert "reduce_scatter(acc_w1, dim 0, sum, x)" in made
    assert not any("all_gather" in step for step in made)


@pytest.mark.parametrize(
    ("mesh", "size", "start", "base"),
    [
        ({"x": 2}, 64, "infinity", "exp2"),
        ({"x": 3}, 61, "infinity", "exp"),
        ({"x": 2, "y": 2}, 50, "infinity", "exp2"),
        ({"x": 7}, 56, "finite", "exp"),
    ],
)
def test_online_softmax(mesh, size, start, base):
    x, v = torch.randn(8, size) * 3, torch.randn(size, 16)
    kernel = compiled(online(8, size, 16, start=start, base=base), mesh, columns(*mesh))
    assert "all_gather" not in kernel.explain()
    close(kernel(x, v), online_reference(x, v))


@pytest.mark.parametrize("start", ["infinity", "finite"])
@pytest.mark.parametrize(
    ("masked", "guarded"), [*((n, False) for n in (1, 8, 13, 32, 48, 64)), *((n, True) for n in (13, 48, 64))]
)
def test_masked_rows_are_what_they_are_on_one_device(masked, guarded, start):
    """NaN where the first block of a row holds nothing, too."""
    x, v = torch.randn(8, 64), torch.randn(64, 16)
    func = online(8, 64, 16, masked=masked, guarded=guarded, start=start)
    kernel = compiled(func, {"x": 4}, columns("x"))
    assert "all_gather" not in kernel.explain()
    close(kernel(x, v), alone(func, x, v))


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("at", [3, 40])
def test_special_values_are_where_they_are_on_one_device(value, at):
    x, v = torch.randn(8, 64), torch.randn(64, 16)
    x[2, at] = value
    func = online(8, 64, 16)
    close(compiled(func, {"x": 4}, columns("x"))(x, v), alone(func, x, v))


def test_the_first_tile_has_to_hold_the_first_block():
    """What is masked in a part of it is not NaN on one device: tiles of 4 become its blocks of 8."""
    x, v = torch.randn(8, 64), torch.randn(64, 16)
    x[:, :4] = -math.inf
    func = online(8, 64, 16)
    kernel = compiled(func, {"x": 16}, columns("x"))
    assert "tiles of dim 1 are whole blocks of 8 (S[1] -> S[1]; B[1]8)" in kernel.explain()
    results = kernel(x, v)
    assert results[0].isfinite().all()
    close(results, alone(func, x, v))


def test_of_one_row_a_program():
    """Loops over the only row carry nothing from one iteration to another."""
    made = steps(online(8, 1024, 16, row_block=1), {"x": 2}, columns("x"))
    assert made == steps(online(8, 1024, 16), {"x": 2}, columns("x"))
    x, v = torch.randn(8, 61) * 3, torch.randn(61, 16)
    close(compiled(online(8, 61, 16, row_block=1), {"x": 3}, columns("x"))(x, v), online_reference(x, v))


@pytest.mark.parametrize(
    ("wrong", "row_block"),
    [*((wrong, 4) for wrong in WRONG), *((wrong, 1) for wrong in WRONG if wrong != "another row")],
)
def test_what_only_looks_like_a_state_stays_whole(wrong, row_block):
    x, v = torch.randn(8, 64).abs(), torch.randn(64, 16)
    func = online(8, 64, 16, wrong=wrong, row_block=row_block)
    kernel = compiled(func, {"x": 2}, columns("x"), poison=False)
    assert "all_gather" in kernel.explain()
    close(kernel(x, v), alone(func, x, v))


def rows_with_nothing(size):
    """Of which whole tiles, or all of them, hold nothing that counts."""
    x = torch.randn(8, size) * 3
    for row, (first, last) in enumerate([(0, 9), (size // 2, size), (size // 4, size // 2), (0, size), (0, size - 1)]):
        x[row, first:last] = -math.inf
    return x


@pytest.mark.parametrize("guard", ["carried", "copied", "powers"])
@pytest.mark.parametrize(("mesh", "size"), [({"x": 2}, 64), ({"x": 3}, 61), ({"x": 2, "y": 2}, 50), ({"x": 7}, 56)])
def test_maxima_with_a_number_in_place_of_the_lowest_value(guard, mesh, size):
    x, v = rows_with_nothing(size), torch.randn(size, 16)
    func = online(8, size, 16, guard=guard, masked=13)
    kernel = compiled(func, mesh, columns(*mesh))
    assert "all_gather" not in kernel.explain()
    close(kernel(x, v), alone(func, x, v))


def test_what_stands_in_on_one_device_is_no_maximum_for_others():
    """Relative to 0, no power of what is there would be more than 0."""
    x, v = rows_with_nothing(64) - 3000, torch.randn(64, 16)
    kernel = compiled(online(8, 64, 16, guard="carried"), {"x": 4}, columns("x"))
    close(kernel(x, v)[:1], online_reference(x, v)[:1])


@pytest.mark.parametrize(
    ("guard", "wrong"),
    [
        (None, "powers of another"),
        *((guard, "guarded by what came before") for guard in ("carried", "copied", "powers")),
        *((guard, "powers of another") for guard in ("carried", "copied", "powers")),
        ("carried", "the stand-in is stored"),
    ],
)
def test_what_may_count_where_the_maximum_is_of_nothing_stays_whole(guard, wrong):
    x, v = torch.randn(8, 64), torch.randn(64, 16)
    func = online(8, 64, 16, guard=guard, wrong=wrong, masked=40)
    kernel = compiled(func, {"x": 2}, columns("x"), poison=False)
    assert "all_gather" in kernel.explain()
    close(kernel(x, v), alone(func, x, v))


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}])
def test_logarithms_of_sums(mesh):
    x = torch.randn(8, 64) * 3
    kernel = compiled(log_sum(8, 64), mesh, {"X": {"x": 1}, "Y": {"x": 1}})
    assert "all_gather" not in kernel.explain()
    close([kernel(x)], [torch.softmax(x.double(), 1).float()])


KV = {"K": {"x": 2}, "V": {"x": 2}}


@pytest.mark.parametrize(
    ("mesh", "layouts", "options"),
    [
        ({"x": 2}, KV, {}),
        ({"x": 2}, KV, {"causal": True}),
        ({"x": 3}, KV, {"causal": True, "seq_kv": 70}),
        ({"x": 3}, {**KV, "Out": {"x": 2}}, {"groups": 2}),
        ({"x": 2, "y": 2}, {"Q": {"y": 1}, "K": {"x": 2, "y": 1}, "V": {"x": 2, "y": 1}, "Out": {"y": 1}}, {}),
        ({"x": 4}, KV, {"seq_q": 1, "seq_kv": 100}),
    ],
)
def test_flash_attention_over_split_keys(mesh, layouts, options):
    sizes = {"seq_q": 32, "seq_kv": 64, **options}
    func = flash_attention(1, 2, dim=16, block_M=16, block_N=16, dtype="float32", **sizes)
    kernel = compiled(func, mesh, layouts)
    assert "all_gather" not in kernel.explain()
    q = torch.randn(1, 2, sizes["seq_q"], 16)
    k, v = (torch.randn(1, 2 // options.get("groups", 1), sizes["seq_kv"], 16) for _ in range(2))
    close([kernel(q, k, v)], [flash_attention_reference(q, k, v, options.get("causal", False))])


def test_compiled_for_this_machine():
    q, k, v = (torch.randn(1, 2, size, 16) for size in (32, 64, 64))
    func = flash_attention(
        1, 2, 32, 64, 16, causal=True, skip_masked_blocks=True, block_M=16, block_N=16, dtype="float32"
    )
    kernel = compiled(func, {"x": 2}, KV, target="c", poison=False)
    assert "all_gather" not in kernel.explain()
    close([kernel(q, k, v)], [flash_attention_reference(q, k, v, causal=True)])


@pytest.mark.parametrize(("columns", "block", "devices"), [(16, 4, 3), (2, 2, 3), (6, 2, 4), (20, 4, 2)])
def test_blocks_of_padding_have_no_maximum(columns, block, devices):
    """Tiles of 6, 6 and 4 in blocks of 4: nothing is taken from what the last device would find in its second one."""
    x = torch.randn(4, columns)
    kernel = compiled(smooth_maximum(4, columns, block), {"x": devices}, {"X": {"x": 1}})
    assert "X.1" not in kernel.explain(), "X is not gathered"
    close([kernel(x)], [torch.logsumexp(x, 1)])


def test_what_a_logarithm_starts_from_counts_once():
    x = torch.randn(4, 12)
    for devices in (2, 3):
        kernel = compiled(smooth_maximum(4, 12, 4, start=0.5), {"x": devices}, {"X": {"x": 1}})
        assert "X.1" not in kernel.explain(), "X is not gathered"
        close([kernel(x)], [torch.logsumexp(torch.cat([x, torch.full((4, 1), 0.5)], 1), 1)])


@pytest.mark.parametrize("block", [1, 2])
def test_what_is_added_beside_a_block_s_own_maximum_may_be_no_reduction(block):
    @T.prim_func
    def first_of_blocks(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            m, before = T.alloc_fragment((4,), "float32"), T.alloc_fragment((4,), "float32")
            total, part = T.alloc_fragment((4,), "float32"), T.alloc_fragment((4,), "float32")
            x = T.alloc_fragment((4, block), "float32")
            T.fill(m, -T.infinity("float32"))
            T.clear(total)
            for k in T.serial(8 // block):
                T.copy(X[0, k * block], x)
                T.copy(m, before)
                T.fill(m, -T.infinity("float32"))
                T.reduce_max(x, m, dim=1, clear=False)
                for i, j in T.Parallel(4, block):
                    x[i, j] = T.exp(x[i, j] - m[i])
                for i in T.Parallel(4):
                    part[i] = x[i, 0]
                for i in T.Parallel(4):
                    total[i] = total[i] * T.exp(before[i] - m[i]) + part[i]
            for i in T.Parallel(4):
                Y[i] = m[i] + T.log(total[i])

    x = torch.randn(4, 8)
    kernel = mt.compile(
        mt.annotate(first_of_blocks, mt.Mesh({"x": 2}), {"X": {"x": 1}, "Y": {}}), target="interpret", poison=True
    )
    torch.testing.assert_close(kernel(x), x[:, ::block].logsumexp(1), rtol=1e-5, atol=1e-5)
