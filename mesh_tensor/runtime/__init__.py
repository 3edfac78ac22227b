"""Who runs a Program: all devices in this process, ranks of torch.distributed, workers of Disco, or one device."""
