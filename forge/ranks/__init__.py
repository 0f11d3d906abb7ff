"""Ranks: the processes that share one model. Knows no torch, no model and no plan.

step_ring      messages of rank 0 to all other ranks, through shared memory
rank_context   what each rank receives at its start: its number and its ends of the pipes
rank_process   the main function of a rank other than 0
process_end    the end and the exit code of a process that several threads look at
rank_group     starts these processes, watches all ranks, and ends all when one ends
torchrun       ranks whose processes torchrun has started
"""
