"""The tests mirror mesh_tensor/: one file per module, failures in files of their own."""
