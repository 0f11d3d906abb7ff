"""Compute hidden states and logits with a checkpoint's layers."""
