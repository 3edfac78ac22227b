"""What is compiled once is kept on disk, and found again where nothing has changed."""

import subprocess
import threading

import tilelang
import torch

from mesh_tensor.runtime import cpu_build
from mesh_tensor.runtime.cpu import compile_for_cpu

from .cpu_kernels import dynamic_scale


def test_the_second_time_nothing_is_compiled(monkeypatch):
    compile_for_cpu(dynamic_scale(5.0))

    def no_compiler(*args, **kwargs):
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(subprocess, "run", no_compiler)
    x = torch.randn(5, 7)
    y = torch.empty_like(x)
    compile_for_cpu(dynamic_scale(5.0))(x, y)
    assert torch.equal(y, x * 5.0)


def test_kernels_and_flags_that_differ_do_not_share_code(monkeypatch):
    first = cpu_build.library_path(dynamic_scale(1.0))
    assert cpu_build.library_path(dynamic_scale(1.0)) == first
    assert cpu_build.library_path(dynamic_scale(1.0000001)) != first
    monkeypatch.setattr(cpu_build, "_FLAGS", (*cpu_build._FLAGS, "-DOTHER"))
    cpu_build._build_stamp.cache_clear()
    try:
        assert cpu_build.library_path(dynamic_scale(1.0)) != first
    finally:
        cpu_build._build_stamp.cache_clear()


def test_many_threads_compile_the_same_kernel_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_build, "_cache_folder", lambda: tmp_path)
    results = []

    def work(value):
        x, y = torch.full((20, 20), value), torch.empty(20, 20)
        compile_for_cpu(dynamic_scale(7.0))(x, y)
        results.append(torch.equal(y, x * 7.0))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_without_a_cache_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_build, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(tilelang.env, "is_cache_enabled", lambda: False)
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    compile_for_cpu(dynamic_scale(9.0))(x, y)
    assert torch.equal(y, x * 9.0)
    assert not list(tmp_path.iterdir())
