"""Build data sets, store them, and provide them to training and evaluation. This package does not import torch."""
