"""From the source text of a kernel to its PrimFunc."""

from __future__ import annotations

import linecache
import logging
from functools import lru_cache

import tilelang.language as T
from tvm import tirx

# TileLang logs the whole kernel when it can't be built, as happens while a counterexample is being made smaller.
logging.getLogger("tilelang.language.eager.builder").setLevel(logging.CRITICAL + 1)


@lru_cache(maxsize=64)
def build(source: str) -> tirx.PrimFunc:
    """The PrimFunc that `source`, a `@T.prim_func` named `kernel`, defines."""
    return build_with(source, {})


def build_with(source: str, names: dict[str, object]) -> tirx.PrimFunc:
    """The same for a source that uses these names. TileLang's parser reads the text again, so it has to be where
    `inspect` looks for it."""
    name = f"<random kernel {hash(source):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        scope: dict[str, object] = {"T": T, "__name__": "random_kernel", **names}
        exec(compile(source, name, "exec"), scope)
    finally:
        del linecache.cache[name]
    func = scope["kernel"]
    assert isinstance(func, tirx.PrimFunc)
    return func
