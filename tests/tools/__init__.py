"""Tools that test the tests."""
