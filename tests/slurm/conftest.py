"""One Slurm for all tests of this folder."""

from slurm_cluster import slurm  # noqa: F401
