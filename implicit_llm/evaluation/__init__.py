"""Evaluate trained models."""
