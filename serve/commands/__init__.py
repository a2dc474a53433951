"""The commands of `dynamiccl-deploy`, by what they are about; `serve/cli.py` puts them together."""
