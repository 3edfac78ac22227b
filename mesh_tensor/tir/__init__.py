"""Words for reading and rewriting TIR."""
