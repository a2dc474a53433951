"""The commands of `dynamiccl-train`, by what they are about; `train/cli.py` puts them together."""
