"""Real architectures, small and with random weights, through torch.export, import and a mesh: `make models`."""
