"""Exercises: tasks for learners, with a stub for each and a check that runs forge's own objects.

    command ──► catalogue ──► stubs/NAME.py ──► learn/03_pool.py      the learner's copy
       │            └──► checks/NAME.py                 │
       └── a process with a time limit: grading ◄───────┘

command     `forge learn`: the list, copies of stubs, the check, and what has passed
catalogue   the exercises in their order
grading     loads a learner's file, runs its check and describes what failed
answers     what a check raises, and comparisons that checks share
checks      one module for each exercise: the task's reference is the engine itself
stubs       what a learner begins with: the task as docstring, and functions to write
"""
