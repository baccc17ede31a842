"""Analyse the Jacobians of trained layers."""
