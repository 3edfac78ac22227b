"""Runs Programs: the backend interface, and the virtual mesh, which has all devices in one process."""

from .mesh_tensor import MeshTensor, distribute, plan_redistribution

__all__ = ["MeshTensor", "distribute", "plan_redistribution"]
