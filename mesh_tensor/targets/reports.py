"""What kernels print, and what becomes of their assertions."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

from mesh_tensor.base.dtypes import is_float, numpy_dtype
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.tir.user_reports import Report

_REPORTER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))
_failures = threading.local()


def tell(report: Report, numbers: Sequence[Any]) -> None:
    """Print what a kernel prints. Refused where that is an assertion, which then does not hold."""
    if report.asserts:
        raise MeshTensorError(_failure(report, numbers))
    print(_line(report, numbers), flush=True)  # noqa: T201  (what the kernel asks for)


def report_from(library: ctypes.CDLL) -> bool:
    """Have what the library's kernel prints and asserts told to this module; False where it does neither."""
    try:
        library.mesh_tensor_report_to(_from_c)
    except AttributeError:
        return False
    return True


def raise_failure() -> None:
    """Raise what an assertion of a compiled kernel has left in this thread, if anything."""
    text = getattr(_failures, "text", None)
    _failures.text = None
    if text is not None:
        raise MeshTensorError(text)


@_REPORTER
def _from_c(code: bytes, numbers: Any) -> None:
    report = Report.decode(code.decode())
    count = len(report.axes) + report.dims
    values: list[Any] = list(numbers[:count])
    if report.dtype:
        raw = int(numbers[count])
        values.append(struct.unpack("<d", struct.pack("<q", raw))[0] if is_float(report.dtype) else raw)
    if not report.asserts:
        tell(report, values)
    elif getattr(_failures, "text", None) is None:
        _failures.text = _failure(report, values)


def _failure(report: Report, numbers: Sequence[Any]) -> str:
    return f"{_device(report, numbers)}a kernel's assertion does not hold: {report.text}"


def _device(report: Report, numbers: Sequence[Any]) -> str:
    here = ", ".join(f"{axis}={int(at)}" for axis, at in zip(report.axes, numbers, strict=False))
    return f"[{here}] " if here else ""


def _line(report: Report, numbers: Sequence[Any]) -> str:
    line = _device(report, numbers) + report.text
    if not report.dtype:
        return line
    number = numpy_dtype(report.dtype).type(numbers[-1])
    if not report.buffer:
        return f"{line}: {number}"
    where = ", ".join(str(int(at)) for at in numbers[len(report.axes) : -1])
    return f"{line}{': ' if report.text else ''}{report.buffer}[{where}] = {number}"
