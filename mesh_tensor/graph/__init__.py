"""The graph level: Relax modules, from annotations to a Program."""

from .annotations import ModuleAnnotations, annotate_module, read_module_annotations

__all__ = ["ModuleAnnotations", "annotate_module", "read_module_annotations"]
