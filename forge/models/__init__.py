"""Implementations of forge.seam.Model. They read plans and know no scheduler and no engine."""
