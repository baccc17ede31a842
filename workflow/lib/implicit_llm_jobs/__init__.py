"""Run every job in a common frame and track it. This package does not import torch."""
