"""Models behind the seam. They see plans and sampling; never a scheduler, a pool or an engine."""
