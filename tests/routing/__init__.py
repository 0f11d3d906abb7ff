"""Tests of forge.routing."""
