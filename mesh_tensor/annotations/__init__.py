"""What users state: how buffers and values lie on a mesh; and reading it back."""
