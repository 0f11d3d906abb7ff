"""Run one model on several devices: each rank has a part of every layer (tensor parallelism)."""
