"""Policies to compare: each file is written as a user would write one, for `--policy FILE.py`.

They import forge, and no module of the simulator. `forge sim --policy ageing` finds ageing.py here.
"""
