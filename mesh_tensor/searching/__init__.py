"""Which shardings are best: named dims of a module, colourings of them with mesh axes, and what each would take."""
