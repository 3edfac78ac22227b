"""What tells kernels on disk apart."""

from mesh_tensor.targets.cpu import build as cpu_build

from .kernels import dynamic_scale


def test_kernels_and_flags_that_differ_do_not_share_code(monkeypatch):
    first = cpu_build.kernel_key(dynamic_scale(1.0))
    assert cpu_build.kernel_key(dynamic_scale(1.0)) == first
    assert cpu_build.kernel_key(dynamic_scale(1.0000001)) != first
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-DOTHER"))
    cpu_build._build_stamp.cache_clear()
    try:
        assert cpu_build.kernel_key(dynamic_scale(1.0)) != first
    finally:
        cpu_build._build_stamp.cache_clear()
