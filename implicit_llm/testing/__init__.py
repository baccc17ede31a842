"""Fault injection for the tests of the promises that a run directory makes."""
