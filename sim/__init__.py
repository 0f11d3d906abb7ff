"""The simulator: the real engine and policy on a virtual clock, in integer nanoseconds.

    workload ──► World ──► Engine ──► TimedModel(HashModel) ──► what happened, and when
                   │                      └─ a cost model says what each step takes
                   └─ one heap of events: arrivals, departures, faults

Owns time and what goes wrong. The scheduler, the cache and the engine are forge's own, unchanged.
"""

if __name__ != "forge.sim":
    raise ImportError("the simulator is the package forge.sim: import forge.sim, not sim")
