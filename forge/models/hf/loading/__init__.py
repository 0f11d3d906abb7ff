"""Open a checkpoint: find its files, read its weights, choose kernels, build an HFModel."""
