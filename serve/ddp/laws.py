"""The laws by their mode."""

from dynamiccl.serve.ddp.law import Gradient, Law
from dynamiccl.serve.ddp.model_law import ModelLaw
from dynamiccl.serve.ddp.paper_law import PaperLaw
from dynamiccl.serve.ddp.settings import Settings


def make_law(settings: Settings, gradient: Gradient) -> Law:
    """The law of `settings.mode`."""
    return (PaperLaw if settings.mode == "paper" else ModelLaw)(settings, gradient)
