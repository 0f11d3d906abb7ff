"""Reports: a run as text, as a terminal drawing, as a Chrome trace and as plots."""
