"""The commands of `dynamiccl-train`."""
