"""What runs one step: kernels on a CPU, a GPU or the interpreter, operators with torch."""
