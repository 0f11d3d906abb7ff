"""Tests of the engine, its loop, its process and the Python interface."""
