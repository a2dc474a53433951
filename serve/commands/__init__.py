"""The commands of `dynamiccl-deploy`."""
