"""Values without TVM or torch: meshes, shardings, errors."""
