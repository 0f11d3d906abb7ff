"""One model on several devices: each rank holds a part of every layer (tensor parallelism)."""
