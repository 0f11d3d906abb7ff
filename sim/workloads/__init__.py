"""Workloads: the requests of a simulation, generated, from traces and from recordings."""
