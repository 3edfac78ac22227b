"""What in a kernel asks which of a block's threads runs it. Where a block runs as one thread, nothing answers."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.base.errors import refuse

from .nodes import function_name, nodes

#: Where a thread index that an author did not name comes from, and the way out.
FROM = "from T.get_thread_binding or the like"
FIX = 'write it with T.Parallel, T.copy and T.reduce_*, or use target="cuda"'


def refuse_thread_groups(func: tirx.PrimFunc, target: str) -> None:
    """Refuse a kernel whose author gives groups of threads different work."""
    found = [attr for attr in nodes(func.body, tirx.AttrStmt) if attr.attr_key == "warp_specialize"]
    if found:
        refuse(
            f"`with T.ws(...)` gives groups of threads different work ({len(found)} times), by their thread index",
            where=f"kernel {function_name(func)!r}, target {target!r}",
            why="a block of the grid runs as one thread there",
            fix="leave that to TileLang: T.Pipelined with copies and T.gemm in it, without T.ws; or use target='cuda'",
        )
