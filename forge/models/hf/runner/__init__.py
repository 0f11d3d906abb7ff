"""Run a step's batch on the device, as a captured CUDA graph where one fits."""
