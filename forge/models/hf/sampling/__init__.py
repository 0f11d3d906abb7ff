"""Turn logits into tokens on the device, as forge/sampling.py defines them."""
