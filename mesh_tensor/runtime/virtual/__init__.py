"""The virtual mesh: all devices of a mesh in one process."""
