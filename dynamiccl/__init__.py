"""DynamICCL: tuning NCCL collectives by offline reinforcement learning.

The kernel (this folder's own files) is the vocabulary and the errors that all parts share; it
imports the standard library only (`belief.py` numpy, too). The five parts stand at the top of the
repository and are linked here: `collect`, `datasets`, `train`, `evaluate`, `serve`. `api.py`, on
top of them, is for notebooks.
"""

__version__ = "0.1.0"
