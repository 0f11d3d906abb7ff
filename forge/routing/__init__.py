"""Routing of requests to replicas: the decision as a pure value, and the state that it reads.

`replica_table` owns the replicas and the requests that they have; `prefix_index` which blocks each
of them holds; `router` decides, from values alone.
"""
