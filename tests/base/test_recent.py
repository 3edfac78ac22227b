"""What is kept of the sizes that came by: the last ones, and no more than a bound."""

import gc
import importlib
import threading
import weakref
from pathlib import Path

import pytest
import tilelang.language as T
import torch
from tvm import relax, tirx

import mesh_tensor as mt
from mesh_tensor.base import recent
from mesh_tensor.base.recent import Recent, made_once

MESH = {"x": 2}


def test_the_oldest_makes_room():
    kept = Recent(2)
    assert (kept.put("a", 1), kept.put("b", 2), kept.get("a"), kept.put("c", 3)) == (1, 2, 1, 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]
    assert (len(kept), list(kept)) == (2, [1, 3])


def test_made_once_while_it_is_kept():
    kept, made = Recent(2), []
    for key in (1, 2, 1, 3, 1, 2):
        assert kept.made(key, lambda key=key: made.append(key) or str(key)) == str(key)
    assert made == [1, 2, 3, 2]


def test_several_threads():
    kept, wrong = Recent(3), []

    def work():
        for number in range(3000):
            key = number % 7
            if kept.made(key, lambda key=key: key + 1) != key + 1:
                wrong.append(key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) <= 3


def test_each_thread_makes_its_own_once():
    made = []

    @made_once(2)
    def work(number):
        """What it does."""
        made.append((number, threading.get_ident()))
        return [number] if number else 1 // number

    assert (work.__name__, work.__doc__) == ("work", "What it does.")
    assert work(1) is work(1)
    elsewhere = threading.Thread(target=work, args=(1,))
    elsewhere.start()
    elsewhere.join()
    assert [number for number, _ in made] == [1, 1]
    assert len({thread for _, thread in made}) == 2
    for number in (2, 3, 1):  # 1 made room
        assert work(number) == [number]
    for _ in range(2):  # what was refused is tried again
        with pytest.raises(ZeroDivisionError):
            work(0)
    assert [number for number, _ in made] == [1, 1, 2, 3, 1, 0, 0]


def doubling():
    """`B = 2 A` for any length."""
    size = T.dynamic("size")

    @T.prim_func
    def double(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 16), threads=128) as bx:
            for i in T.Parallel(16):
                if bx * 16 + i < size:
                    B[bx * 16 + i] = A[bx * 16 + i] * 2.0

    return mt.annotate(double, MESH, {"A": {"x": 0}, "B": {"x": 0}})


@pytest.fixture
def few(monkeypatch):
    """Caches of three sizes."""
    for name in (
        "api.compiled",
        "program.symbolic",
        "api.module_calls",
        "api.module_plans",
        "program.families",
        "targets.kernels",
    ):
        module = importlib.import_module(f"mesh_tensor.{name}")
        for bound in ("KERNEL_SIZES", "MODULE_SIZES"):
            if hasattr(module, bound):
                monkeypatch.setattr(module, bound, 3)
    return 3


def test_a_kernel_with_many_sizes(few):
    """Programs and launches of sizes that are long past are gone, and made again when they return."""
    kern = mt.compile(doubling(), target="interpret")
    programs, peak = [], 0
    for length in (40, 5, 6, 7, 8, 9, 40, 9, 5):
        a = torch.randn(length)
        assert torch.equal(kern(a), 2 * a)
        programs.append(weakref.ref(kern.program))
        peak = max(peak, kern.peak_bytes)
        assert kern.peak_bytes == peak == 2 * 4 * 20
    gc.collect()
    alive = {id(program()) for program in programs if program() is not None}
    assert len(alive) <= few


def test_a_module_with_many_sizes(few):
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorStructInfo((n, 4), "float32"))
    w = relax.Var("w", relax.TensorStructInfo((4, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.op.matmul(x, w)))
        builder.emit_func_output(result)
    weight = torch.randn(4, 4)
    run = mt.distribute_module(builder.get(), MESH, {"x": {"x": 0}}, weights={"w": weight})
    plans = []
    for length in (5, 6, 7, 8, 5, 8):
        a = torch.randn(length, 4)
        torch.testing.assert_close(run(a), a @ weight)
        plans.append(weakref.ref(run.plan))
    gc.collect()
    assert len({id(plan()) for plan in plans if plan() is not None}) <= few


def test_bounds_are_those_that_the_page_says():
    page = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"the last {recent.KERNEL_SIZES} sizes, a module for the last {recent.MODULE_SIZES}" in page
