"""Rules for evicting cached blocks, measured on the accesses of a workload."""
