"""Exercises of `forge learn`: stubs fail, references pass, known wrong answers get their hints."""
