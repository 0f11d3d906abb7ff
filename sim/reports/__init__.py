"""Show a run: text, terminal, Chrome trace and plots."""
