"""Policies to compare: each is a file as a user has one, for `--policy FILE.py`.

They import forge and nothing of the simulator. `forge sim --policy ageing` finds ageing.py here.
"""
