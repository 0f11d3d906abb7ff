"""Sampling on the device, as forge.sampling defines it: from logits to tokens."""
