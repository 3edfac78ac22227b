"""From one global-view TileLang kernel to a running mesh.

`__init__.pyi` lists the public names; their modules are imported when they are first used.
"""

from .base.environment import check_cache_folder, check_tvm, check_versions, names_of

check_versions()
check_tvm()
check_cache_folder()

import tilelang as _tilelang  # noqa: E402, F401  (brings the TVM that every module below imports)

__getattr__, __dir__, __all__ = names_of(__name__, __file__)
