"""The simulator: the real engine and policy on a virtual clock, in integer nanoseconds.

    workload ──► World ──► Engine ──► VirtualClockModel(HashModel) ──► log, metrics, reports
                   │                      └─ a cost model gives the time of each step
                   └─ one heap of events: arrivals, disconnects, faults

Owns time and faults. The scheduler, the prefix cache and the engine are those of forge, unchanged.
"""

if __name__ != "forge.sim":
    raise ImportError("the simulator is the package forge.sim: import forge.sim, not sim")
