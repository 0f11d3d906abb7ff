"""References: one right answer for each exercise. They are not in the package."""
