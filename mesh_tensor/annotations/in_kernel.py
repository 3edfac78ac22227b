"""Errors in the body of a kernel, which TileLang traces: our own come alone, and say at which line."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from tilelang.language.eager.builder import Builder

from mesh_tensor.base.errors import MeshTensorError


class _OursAlone(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """TileLang logs the source of a function that raises, on the way out: not where the error says all itself."""
        return not isinstance(sys.exc_info()[1], MeshTensorError)


def keep_quiet() -> None:
    """From now on, TileLang's tracer logs nothing about a MeshTensorError. What others raise it logs as before."""
    logger = logging.getLogger(Builder.__module__)
    if not any(isinstance(found, _OursAlone) for found in logger.filters):
        logger.addFilter(_OursAlone())


def at_line(helper: Callable[..., Any]) -> Callable[..., Any]:
    """The helper; what it raises while a kernel is traced names the kernel's file and line."""

    @functools.wraps(helper)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return helper(*args, **kwargs)
        except MeshTensorError as error:
            builder = Builder.current()
            file, line = getattr(builder, "current_file", ""), getattr(builder, "current_line", 0)
            if not file or not line:
                raise
            raise MeshTensorError(f"{error}\n  line: {file}:{line}") from None

    return located
