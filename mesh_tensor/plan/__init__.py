"""One graph, and who splits what: propagation, decision, explicit changes of layout."""
