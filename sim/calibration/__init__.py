"""Calibration: measure an engine and fit cost tables to it."""
