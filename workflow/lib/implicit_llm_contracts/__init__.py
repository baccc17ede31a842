"""What the driver and the library agree on, by the standard library alone: a process that plans needs no torch.

`config` says what a result is, `runs` how a job's run directory, manifest and journal are written and read.
"""

__version__ = "0.2.0"
